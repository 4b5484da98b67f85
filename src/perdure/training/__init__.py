"""Training of an experiment: the loop over tasks and rounds, client sampling and evaluation."""
