"""Secure aggregation, clipping and noise, and what may be claimed of them."""
