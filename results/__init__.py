"""Stored results: ``<task>/<label>.seed-<n>.json`` measured here, ``published/*.json`` as printed elsewhere."""
