"""Predictions over HTTP: an application around a trained model, and its server."""
