"""Typed readers of values that other machines send: JSON and the parts of decoded trees.

A message is a dataclass whose fields are annotated with a `Bound`, and `read_message` reads it.
Every reader returns the value, or raises a ValueError of one short sentence, whatever arrives.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, fields, is_dataclass
from functools import lru_cache
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

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


# ---- Messages: dataclasses whose fields say what may arrive in them

Message = TypeVar("Message")


class Bound:
    """What a value of a message may be. Use it as `Annotated[int, Integer(0, 9)]`."""

    def read(self, key: str, value: Any) -> Any:
        """Return a received value, or raise a ValueError that begins with its key."""
        raise NotImplementedError


@dataclass(frozen=True)
class Anything(Bound):
    """A value whose reader needs more than the message, and comes later."""

    def read(self, key: str, value: Any) -> Any:
        """Return the value."""
        return value


@dataclass(frozen=True)
class Mapped(Bound):
    """A mapping whose reader needs more than the message, and comes later."""

    def read(self, key: str, value: Any) -> dict[str, Any]:
        """Return the mapping."""
        return read_mapping(key, value)


@dataclass(frozen=True)
class Integer(Bound):
    """An integer in [low, high]."""

    low: int
    high: int

    def read(self, key: str, value: Any) -> int:
        """Return an integer; booleans are none."""
        return read_integer(key, value, self.low, self.high)


@dataclass(frozen=True)
class Number(Bound):
    """A number in [low, high]."""

    low: float
    high: float

    def read(self, key: str, value: Any) -> float:
        """Return a number as a float."""
        return read_number(key, value, self.low, self.high)


@dataclass(frozen=True)
class Flag(Bound):
    """True or false."""

    def read(self, key: str, value: Any) -> bool:
        """Return a boolean."""
        if not isinstance(value, bool):
            raise bad(key, value, "true or false")
        return value


@dataclass(frozen=True)
class Text(Bound):
    """A string of at most `longest` characters."""

    longest: int = LONGEST_NAME

    def read(self, key: str, value: Any) -> str:
        """Return a string."""
        return read_text(key, value, self.longest)


@dataclass(frozen=True)
class Sentence(Bound):
    """A string for a log, of at most `longest` characters."""

    longest: int

    def read(self, key: str, value: Any) -> str:
        """Return one printable line."""
        return one_line(read_text(key, value, self.longest))


@dataclass(frozen=True)
class Hexadecimal(Bound):
    """Bytes as hexadecimal digits, at most `longest` of them."""

    longest: int

    def read(self, key: str, value: Any) -> str:
        """Return the digits."""
        digits = read_text(key, value, self.longest)
        bytes.fromhex(digits)
        return digits


@dataclass(frozen=True)
class OneOf(Bound):
    """One of several strings."""

    allowed: tuple[str, ...]

    def read(self, key: str, value: Any) -> str:
        """Return a string that is allowed."""
        if read_text(key, value) not in self.allowed:
            raise bad(key, value, f"one of {', '.join(self.allowed)}")
        return str(value)


@dataclass(frozen=True)
class Optional(Bound):
    """A value, or None."""

    inner: Bound

    def read(self, key: str, value: Any) -> Any:
        """Return None or the value."""
        return None if value is None else self.inner.read(key, value)


@dataclass(frozen=True)
class Items(Bound):
    """A list of at most `longest` values of one kind, each of which may have to be unique."""

    inner: Bound
    longest: int
    distinct: bool = False

    def read(self, key: str, value: Any) -> tuple[Any, ...]:
        """Return the values as a tuple."""
        values = [self.inner.read(key, each) for each in read_list(key, value, self.longest)]
        return tuple(read_distinct(key, values) if self.distinct else values)


@dataclass(frozen=True)
class Entries(Bound):
    """A mapping with exactly these names, or if there are none with the numbers of clients."""

    inner: Bound
    names: tuple[str, ...] | None = None

    def read(self, key: str, value: Any) -> dict[str, Any]:
        """Return the mapping."""
        entries = read_mapping(key, value, self.names)
        if self.names is None:
            for name in entries:
                if not re.fullmatch("0|[1-9][0-9]{0,6}", name):
                    raise bad(key, name, "the number of a client")
        return {name: self.inner.read(key, entry) for name, entry in entries.items()}


@dataclass(frozen=True)
class Shape(Bound):
    """The shape of a tensor that fits into memory."""

    def read(self, key: str, value: Any) -> tuple[int, ...]:
        """Return the shape."""
        return read_shape(key, value)


@dataclass(frozen=True)
class TensorMap(Bound):
    """Tensors of real numbers by name."""

    def read(self, key: str, value: Any) -> dict[str, Tensor]:
        """Return the tensors."""
        return read_tensors(key, value)


@dataclass(frozen=True)
class Octets(Bound):
    """Bytes as a vector of uint8, of one of these sizes if any is given."""

    sizes: tuple[int, ...] = ()

    def read(self, key: str, value: Any) -> bytes:
        """Return the bytes; an empty string stands for none."""
        if value == "" and isinstance(value, str):
            data = b""
        elif isinstance(value, Tensor) and value.dtype == torch.uint8 and value.dim() == 1:
            data = value.numpy().tobytes()
        else:
            raise bad(key, value, "a vector of uint8")
        if self.sizes and len(data) not in self.sizes:
            raise bad(key, len(data), f"of {' or '.join(map(str, self.sizes))} bytes")
        return data


@dataclass(frozen=True)
class Table(Bound):
    """Bytes of one size by number: a mapping of `clients` and of `rows`, all in one vector."""

    size: int
    numbers: Items

    def read(self, key: str, value: Any) -> dict[int, bytes]:
        """Return the bytes by number."""
        entries = read_mapping(key, value, ("clients", "rows"))
        clients = self.numbers.read("clients", entries["clients"])
        rows = Octets().read(key, entries["rows"])
        if len(rows) != self.size * len(clients):
            raise ValueError(f"{key}: a table must have one row per client")
        return {c: rows[k * self.size : (k + 1) * self.size] for k, c in enumerate(clients)}


@dataclass(frozen=True)
class Part(Bound):
    """A message within another one."""

    message: type[Any]

    def read(self, key: str, value: Any) -> Any:
        """Return the message; the key comes first in its errors, too."""
        try:
            return read_message(self.message, "its keys", value)
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from None


def read_message(message: type[Message], key: str, value: Any, may_lack: bool = False) -> Message:
    """Return a message of a class from the mapping that arrived.

    Its method `check`, if there is one, refuses values that do not fit each other.

    Args:
        message: A dataclass.
        key: How errors name the message.
        value: What arrived.
        may_lack: Whether keys that have a default may be missing.

    Raises:
        ValueError: A key is missing or unknown, or a value is out of its bound.

    """
    kind: Any = message
    bounds = _bounds_of(kind)
    values = read_mapping(key, value, None if may_lack else bounds)
    if not set(values) <= set(bounds):
        raise ValueError(f"{key}: must have no keys but {', '.join(sorted(bounds))}")
    found = message(**{name: bounds[name].read(name, each) for name, each in values.items()})
    check = getattr(found, "check", None)
    if check is not None:
        check()
    return found


@lru_cache
def _bounds_of(message: Any) -> dict[str, Bound]:
    """Return the bound of each field of a class."""
    types = get_type_hints(message, include_extras=True)
    return {each.name: _bound_of(types[each.name]) for each in fields(message)}


def _bound_of(declared: Any) -> Bound:
    if is_dataclass(declared) and isinstance(declared, type):
        return Part(declared)
    metadata = get_args(declared)[1:] if get_origin(declared) is Annotated else ()
    return next(bound for bound in metadata if isinstance(bound, Bound))
