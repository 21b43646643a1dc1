"""What made files of the package: run once, from the root of the repository."""
