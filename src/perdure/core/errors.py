"""Errors that are shown to a user as one sentence: mistakes in the input, and failed runs."""

from __future__ import annotations


class PerdureError(Exception):
    """Base of the errors that are shown to a user as one sentence, without a traceback."""

    exit_code = 1
    """Exit code of the command line."""


class UserError(PerdureError):
    """A mistake in a config, a file or a flag, found before anything is trained or written."""

    exit_code = 2


class InUse(UserError):
    """A folder that another process uses."""


class RunError(PerdureError):
    """A failure during a run, which leaves a run directory that can be resumed."""

    exit_code = 1
    can_resume = True
    """Whether the run may succeed when it is resumed."""


def bad_value(key: str, value: object, expected: str) -> UserError:
    """Return the error for a bad value.

    Example:
        >>> print(bad_value("clients.count", 0, "at least 1"))
        clients.count: must be at least 1, got 0
    """
    return UserError(f"{key}: must be {expected}, got {value!r}")
