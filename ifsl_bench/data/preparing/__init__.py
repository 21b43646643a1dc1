"""The way from a name and a path to a prepared data set, and what commands say of data sets."""
