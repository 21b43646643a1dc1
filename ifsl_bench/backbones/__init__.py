"""Networks, pretraining, base classifiers, weights and features; the choice of devices."""
