"""A sample plugin for perdure."""
