"""Methods by name. Each is one file with the paper's algorithm and nothing else."""
