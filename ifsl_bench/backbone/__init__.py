"""From images to features: networks, pretraining, feature banks, devices."""
