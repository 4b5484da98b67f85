"""Typed readers of values that other machines send: JSON and the parts of decoded trees.

Every reader returns the value, or raises a ValueError of one short sentence, whatever arrives.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

LONGEST_NAME = 1000
"""Characters of a name, such as that of a parameter."""
DEEPEST = 64
"""Levels of nested lists and mappings."""
FEW_VALUES = 100_000
"""JSON values that a message of any size may hold."""
_BYTES_PER_VALUE = 12
"""Bytes of a message for each further value: a value takes up to 120 bytes of memory."""
_LARGEST_EXTENT = 1 << 31
_MAX_RANK = 16
_SHOWN = 80
_LONGEST_LINE = 300
REAL_DTYPES = (
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
)  # fmt: skip
"""Types of the tensors that are sent."""


def brief(value: object) -> str:
    """Return a received value for an error message: printable, of one line, not too long."""
    if isinstance(value, str):
        return repr(value if len(value) <= _SHOWN else value[:_SHOWN] + "...")
    if isinstance(value, bool | float) or value is None:
        return repr(value)
    if isinstance(value, int):
        return str(value) if value.bit_length() < 128 else "an integer of many digits"
    return f"a {type(value).__name__}"


def one_line(text: str) -> str:
    """Return a received text for a log: one line, not too long, printable characters only."""
    plain = "".join(c if c.isprintable() else " " for c in text[: 4 * _LONGEST_LINE])
    return " ".join(plain.split())[:_LONGEST_LINE]


def bad(key: str, value: object, expected: str) -> ValueError:
    """Return the error for a received value."""
    return ValueError(f"{key}: must be {expected}, got {brief(value)}")


def read_json(text: str | bytes, size: int | None = None) -> Any:
    """Return the value of a JSON text whose memory is bounded by its size.

    Raises:
        ValueError: The text is not JSON, repeats a key, is nested too deeply, or has so many values
            that they would need far more memory than the message.

    """
    size = len(text) if size is None else size
    if _count_json_values(text) > max(FEW_VALUES, size // _BYTES_PER_VALUE):
        raise ValueError("JSON: has too many values for its size")
    try:
        value = json.loads(text, object_pairs_hook=_without_repeats)
    except RecursionError:
        raise ValueError("JSON: is nested too deeply") from None
    check_depth(value)
    return value


def _count_json_values(text: str | bytes) -> int:
    """Return an upper bound on the number of values in a JSON text."""
    marks: Iterable[Any] = ",[{" if isinstance(text, str) else (b",", b"[", b"{")
    return 1 + sum(text.count(mark) for mark in marks)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("JSON: a key is repeated")
    return values


def check_depth(value: Any) -> None:
    """Refuse lists and mappings that are nested too deeply for functions that call themselves.

    Raises:
        ValueError: More than `DEEPEST` levels.

    """
    level = [value]
    for _ in range(DEEPEST):
        level = [inner for outer in level for inner in _inner(outer)]
        if not level:
            return
    raise ValueError(f"a message must have at most {DEEPEST} levels")


def _inner(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def read_integer(key: str, value: Any, low: int, high: int) -> int:
    """Return an integer in [low, high]; booleans, floats and digits in strings are none."""
    if type(value) is not int or not low <= value <= high:
        raise bad(key, value, f"an integer from {low} to {high}")
    return value


def read_number(key: str, value: Any, low: float, high: float) -> float:
    """Return a number in [low, high] as a float."""
    if type(value) not in (int, float) or not low <= value <= high:  # false for NaN
        raise bad(key, value, f"a number from {low:g} to {high:g}")
    return float(value)


def read_text(key: str, value: Any, longest: int = LONGEST_NAME) -> str:
    """Return a string of at most `longest` characters."""
    if not isinstance(value, str) or len(value) > longest:
        raise bad(key, value, f"a string of at most {longest} characters")
    return value


def read_list(key: str, value: Any, longest: int) -> list[Any]:
    """Return a list of at most `longest` values."""
    if not isinstance(value, list) or len(value) > longest:
        raise bad(key, value, f"a list of at most {longest} values")
    return value


def read_mapping(key: str, value: Any, names: Iterable[str] | None = None) -> dict[str, Any]:
    """Return a mapping, with exactly these names if they are given."""
    if not isinstance(value, dict):
        raise bad(key, value, "a mapping")
    if names is not None and set(value) != set(names):
        raise ValueError(f"{key}: must have exactly the keys {', '.join(sorted(names))}")
    return value


def read_distinct(key: str, values: list[Any]) -> list[Any]:
    """Return values, none of which may be there twice."""
    if len(set(values)) != len(values):
        raise ValueError(f"{key}: must have no value twice")
    return values


def read_shape(key: str, value: Any) -> tuple[int, ...]:
    """Return the shape of a tensor, whose extents are bounded even if it has no elements."""
    extents = read_list(key, value, _MAX_RANK)
    shape = tuple(read_integer(key, extent, 0, _LARGEST_EXTENT) for extent in extents)
    if math.prod(max(1, extent) for extent in shape) > _LARGEST_EXTENT:
        raise bad(key, value, "the shape of a tensor that fits into memory")
    return shape


def read_tensors(key: str, value: Any) -> dict[str, Tensor]:
    """Return tensors of real numbers by name."""
    tensors = read_mapping(key, value)
    for name, tensor in tensors.items():
        read_text(key, name)
        if not isinstance(tensor, Tensor) or tensor.dtype not in REAL_DTYPES:
            raise bad(f"{key}: {brief(name)}", tensor, "a tensor of real numbers")
    return tensors
