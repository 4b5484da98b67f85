"""Run several methods, settings and seeds under one protocol, and compare them."""
