"""Types of config values in words, for docs and the command line."""

from __future__ import annotations

from collections.abc import Iterable
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel

_NAMES: dict[Any, str] = {int: "integer", float: "number", bool: "true or false", str: "string"}
_SIGNS = ((Gt, ">", "gt"), (Ge, ">=", "ge"), (Lt, "<", "lt"), (Le, "<=", "le"))


def type_in_words(annotation: Any, metadata: Iterable[Any] = ()) -> str:
    """Return a type such as `Annotated[int, Field(ge=1)]` as `integer; >= 1`.

    Args:
        annotation: The type.
        metadata: Further bounds, which pydantic keeps apart from the type of a field.
    """
    return "; ".join(dict.fromkeys([*_words(annotation), *_bounds(metadata)]))


def value_in_words(value: Any) -> str:
    """Return a value as it is written in YAML."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return str(list(value)) if isinstance(value, tuple) else str(value)


def _words(annotation: Any) -> list[str]:
    origin, parts = get_origin(annotation), get_args(annotation)
    if hasattr(annotation, "__metadata__"):
        return _words(parts[0]) + _bounds(parts[1:])
    if origin is Literal:
        return [" or ".join(str(part) for part in parts)]
    if origin in (Union, UnionType):
        kinds = ["; ".join(_words(part)) for part in parts if part is not NoneType]
        return [", or ".join(dict.fromkeys(kinds))]
    if origin in (list, tuple):
        return ["list of: " + "; ".join(_words(parts[0]))]
    if origin is dict or _is_section(annotation):
        return ["mapping"]
    return [_NAMES.get(annotation, getattr(annotation, "__name__", "value"))]


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _bounds(metadata: Iterable[Any]) -> list[str]:
    words: list[str] = []
    for part in metadata:
        words += _bounds(getattr(part, "metadata", None) or ())
        words += [f"{sign} {getattr(part, name)}" for kind, sign, name in _SIGNS
                  if isinstance(part, kind)]  # fmt: skip
    return words
