"""What becomes of a trained model: its files, predictions, other runtimes, and HTTP."""
