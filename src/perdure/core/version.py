"""The version of perdure."""

__version__ = "0.2.0"
