"""Check the content of a result.json, which anybody may have changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from perdure.core.errors import UserError
from perdure.core.json_text import is_count, is_number


def check_result(path: str | Path, result: dict[str, Any]) -> None:
    """Refuse a result that lacks what every report needs, or has it in another form.

    Args:
        path: The run directory.
        result: The content of its result.json.
    """
    missing = [key for key in _NEEDED if key not in result]
    if missing:
        raise UserError(f"{path}: result.json lacks {', '.join(missing)}")
    wrong = next((key for key, allowed in _NEEDED.items() if not allowed(result[key])), None)
    if wrong is not None:
        raise UserError(f"{path}: result.json has an invalid {wrong}, got {_short(result[wrong])}")


def _has(*keys: str) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(key in value for key in keys)


def _is_row(value: Any) -> bool:
    """Return whether a value is None, or a list or a mapping of numbers and None."""
    cells = value.values() if isinstance(value, dict) else value
    is_group = isinstance(value, dict | list)
    return value is None or (is_group and all(v is None or is_number(v) for v in cells))


def _is_table(value: Any) -> bool:
    return value is None or (isinstance(value, list) and all(map(_is_row, value)))


_NEEDED: dict[str, Callable[[Any], bool]] = {
    "method": lambda value: isinstance(value, str),
    "seed": is_count,
    "tasks": is_count,
    "matrix": lambda value: _has()(value) and all(map(_is_table, value.values())),
    "metrics": lambda value: _has("task_agnostic")(value) and all(map(_is_row, value.values())),
    "measure": lambda value: value in ("accuracy", "r2"),
    "bytes": _has("up", "down", "by_task", "by_field", "types", "kept"),
    "seconds": _has("total", "by_task"),
    "draws": lambda value: isinstance(value, str),
}
"""Keys that a result.json must have, and the checks of their values."""


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
