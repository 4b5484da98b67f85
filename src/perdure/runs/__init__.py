"""What a run leaves on disk: checkpoints, client states, events and results."""
