"""Loading of episodes, meta-training and evaluation."""
