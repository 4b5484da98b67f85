"""The version of perdure."""

__version__ = "0.1.0"
