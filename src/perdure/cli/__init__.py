"""The command line: parses arguments, calls the library and prints the outcome."""
