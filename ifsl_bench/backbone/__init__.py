"""The way from images to features: networks, pretraining, feature banks, devices."""
