"""The command line: parses and prints; each command is one call of the library."""
