"""Mathematics that several methods share and a textbook would explain."""
