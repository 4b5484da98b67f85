"""Runs: train a config to its end, resume and extend it, compare many, and all files on disk."""
