"""The plain networks of this library: each a kind with its keys and its module."""
