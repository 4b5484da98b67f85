"""Change one key of a config that is given as plain values."""

from __future__ import annotations

from typing import Any

from perdure.config.kinds import drop_other_kinds
from perdure.core.errors import UserError


def override_key(values: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """Return the values with `section.key` changed.

    Another kind of a section leaves only those of its keys that the new kind has.
    """
    return _set(values, key.split("."), value, key)


def _set(values: Any, path: list[str], value: Any, key: str) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise UserError(f"--set {key}: {path[0]!r} lies below a value that is not a section")
    if len(path) == 1:
        return drop_other_kinds(values, key, value) | {path[0]: value}
    return values | {path[0]: _set(values.get(path[0]) or {}, path[1:], value, key)}
