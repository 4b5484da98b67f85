"""The version of perdure."""

__version__ = "0.3.0"
