"""Data sets: six pools of labelled images or features, with one form on disk for all of them."""
