"""What is read of files: archives, pickles and encoded images."""
