"""Readers of untrusted files: archives, pickles and encoded images."""
