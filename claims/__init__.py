"""Claims of the papers, tested by small runs: a catalog, the runs that it needs, the verdicts."""
