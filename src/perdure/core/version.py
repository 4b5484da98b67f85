"""The version of perdure."""

__version__ = "0.4.0"
