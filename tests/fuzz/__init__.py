"""Damaged and hostile files, made by the thousand: reading one ends in success or in one line; see ``test_fuzz.py``."""
