"""Stored results: kept, checked, made again."""
