"""The data sets: each says what its files should hold and which image goes into which pool."""
