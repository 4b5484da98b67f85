"""Run directories: configs, checkpoints, events, results and trained models on disk."""
