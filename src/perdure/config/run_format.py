"""The version of the format of run directories, which their config.yaml says."""

from __future__ import annotations

from typing import Any

from perdure.core.errors import UserError

FORMAT = 3
"""Since 3, runs can be extended. A config that says none is of format 1 or 2 (perdure 0.1 to 0.3),
which `perdure.config.saved` and `perdure.config.earlier_runs` read."""
_KEY = "format"


def with_format(text: str) -> str:
    """Return the YAML of a config as a run directory keeps it."""
    return f"{_KEY}: {FORMAT}\n{text}"


def without_format(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a config without the version of its format.

    Raises:
        UserError: The format is a later one.
    """
    version = values.get(_KEY, 1)
    if version not in range(1, FORMAT + 1):
        raise UserError(
            f"format: must be 1 to {FORMAT}, which this version of perdure reads, got {version!r}"
        )
    return {key: value for key, value in values.items() if key != _KEY}
