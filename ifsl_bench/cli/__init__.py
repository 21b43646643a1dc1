"""The command line: it parses arguments, calls the library and prints."""
