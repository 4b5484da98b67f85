"""Read JSON that others wrote."""

from __future__ import annotations

import json
from typing import Any


def json_value(text: str | bytes) -> Any:
    """Return the value of a JSON text; ValueError if it is none, or nested too deep to be read."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deep") from None


def is_number(value: Any, largest: float = 1e18) -> bool:
    """Return whether a value is a finite number of a plausible size."""
    is_real = isinstance(value, int | float) and not isinstance(value, bool)
    return is_real and -largest <= value <= largest


def is_count(value: Any, largest: int = 2**63) -> bool:
    """Return whether a value is an integer from 0 to a plausible size."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= largest
