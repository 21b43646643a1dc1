"""Scripts that made package files: run once, from the root of the repository."""
