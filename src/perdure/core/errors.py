"""Errors that are shown to a user as one sentence: mistakes in the input, and failed runs."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import NoReturn


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


# ---- Errors of a method that breaks the contract: one sentence, the same on every engine


class ContractError(RunError):
    """A method broke the contract. The message names the function, the value and the remedy."""

    can_resume = False  # it would fail the same way: the method has to be corrected


def refuse(where: str, got: object, expected: str) -> NoReturn:
    """Raise a ContractError `{where}: must be {expected}, got {got}`.

    Args:
        where: The function or value of the method that is wrong.
        got: What it is, in words.
        expected: What it must be, in words that follow "must be".

    """
    raise ContractError(f"{where}: must be {expected}, got {got}")


def type_name(value: object) -> str:
    """Return the type of a value with its article, for an error message."""
    return "None" if value is None else with_article(type(value).__name__)


def with_article(noun: str) -> str:
    """Return a noun with "a" or "an" before it."""
    return f"{'an' if noun[0].lower() in 'aeiou' else 'a'} {noun}"


def check_name(where: str, name: str, allowed: Iterable[str]) -> None:
    """Refuse a name that is not among the allowed ones, and suggest the closest of them."""
    names = list(allowed)
    if name in names:
        return
    closest = difflib.get_close_matches(name, names, 1)
    hint = f" (did you mean {closest[0]!r}?)" if closest else ""
    refuse(where, f"{name!r}{hint}", _one_of(names))


def _one_of(names: list[str]) -> str:
    if not names:
        return "left out (there are no names to choose from)"
    return names[0] if len(names) == 1 else f"one of {', '.join(names)}"
