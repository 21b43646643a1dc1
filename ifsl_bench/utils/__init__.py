"""Errors, paths, atomic files, locks, threads and progress: what every other package uses."""
