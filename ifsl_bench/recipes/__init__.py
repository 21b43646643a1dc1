"""Recipes train a backbone on base classes: cross-entropy, rotations, contrastive losses and more."""
