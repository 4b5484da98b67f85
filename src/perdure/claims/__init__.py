"""What the papers claim, tested at small size: a declarative list, the runs, the verdicts."""
