"""Preparation of a data set from a name and a path, and the descriptions that commands print."""
