"""Stored results: their schema, folders, checks, published rows, and what the cache of the home holds."""
