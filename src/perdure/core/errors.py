"""What can go wrong, as two kinds: what the user said, and what happened during a run."""

from __future__ import annotations


class PerdureError(Exception):
    """Base of the errors that are shown to a person as one sentence, without a traceback."""

    exit_code = 1


class UserError(PerdureError):
    """A mistake in a config, a file or a flag: found before anything is trained or written."""

    exit_code = 2


class RunError(PerdureError):
    """A failure during a run, which leaves a run directory that can be resumed."""

    exit_code = 1


def bad_value(key: str, value: object, allowed: str) -> UserError:
    """The one sentence for a bad value: the key, the value and what is allowed."""
    return UserError(f"{key}: must be {allowed}, got {value!r}")
