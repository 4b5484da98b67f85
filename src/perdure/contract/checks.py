"""Errors of a method that breaks the contract: one sentence, the same on every engine."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from perdure.core.errors import RunError


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


def check_tensors(where: str, values: Any, allowed: Mapping[str, torch.Size]) -> None:
    """Refuse values that are not tensors with the names and shapes of `allowed`.

    Args:
        where: The function of the method that returned the values.
        values: Any value. Only a dict of tensors is accepted; it may lack some of the names.
        allowed: Shapes by name.

    """
    if not isinstance(values, Mapping):
        refuse(where, type_name(values), "a dict of tensors by parameter name")
    for name, value in values.items():
        if name not in allowed:
            check_name(where, name, allowed)
        if not isinstance(value, Tensor):
            refuse(f"{where}: {name!r}", type_name(value), "a tensor")
        if value.shape != allowed[name]:
            shape = list(allowed[name])
            refuse(f"{where}: {name!r}", f"shape {list(value.shape)}", f"of shape {shape}")
