"""Sections whose other keys are arguments of the user's class or function."""

from __future__ import annotations

from collections.abc import Container
from typing import Any


def with_arguments(values: Any, fields: Container[str]) -> Any:
    """Return the values of a section with the keys that are no fields in `arguments`.

    Args:
        values: The section; what is not a dict is returned unchanged.
        fields: Keys of the section.

    Raises:
        ValueError: An argument is given twice.
    """
    if not isinstance(values, dict):
        return values
    free = {key: value for key, value in values.items() if key not in fields}
    arguments = values.get("arguments", {})
    twice = next((key for key in free if key in arguments), None)
    if twice is not None:
        expected = "given once, as a key or in arguments"
        raise ValueError(f"{twice}: must be {expected}, got {free[twice]!r}")
    known = {key: value for key, value in values.items() if key in fields}
    return {**known, "arguments": {**arguments, **free}}


def check_plain(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments; ValueError if one is not a value that YAML can hold."""
    for key, value in arguments.items():
        if not _is_plain(value):
            raise ValueError(f"{key}: must be a value that YAML can hold, got {value!r}")
    return arguments


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(inner) for key, inner in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)
