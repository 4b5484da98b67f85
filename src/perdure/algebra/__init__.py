"""What methods share and a textbook would explain."""
