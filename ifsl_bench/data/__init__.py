"""Data sets: six pools of labelled images (or features), one form on disk for all."""
