"""Benchmarks of speed and memory; each module has a `main` that returns its figures."""
