"""The base of every room: errors, files on disk, progress, seeds and training states."""
