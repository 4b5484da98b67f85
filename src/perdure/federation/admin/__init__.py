"""Create and run a federation: its folders, keys, submissions and processes."""
