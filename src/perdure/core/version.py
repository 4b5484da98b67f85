"""The version of perdure."""

__version__ = "0.4.0"


def has_same_minor(version: str) -> bool:
    """Return whether another version differs from this one in the last number at most.

    Example:
        >>> has_same_minor("0.0.1")
        False
    """
    return version.split(".")[:2] == __version__.split(".")[:2]
