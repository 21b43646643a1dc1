"""Experiments: from a request to jobs, their stages, and stored results."""
