"""Recipes, ways to train a backbone on the base classes: cross-entropy, rotations, contrastive losses and more."""
