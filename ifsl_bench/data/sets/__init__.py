"""Data sets: for each, the files that it expects and the pool that each image goes into."""
