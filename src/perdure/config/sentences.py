"""Sentences for people: what is wrong with a config, and what its keys may hold."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel

# ---- Types of config values in words, for docs and the command line

_NAMES: dict[Any, str] = {int: "integer", float: "number", bool: "true or false", str: "string"}
_SIGNS = ((Gt, ">", "gt"), (Ge, ">=", "ge"), (Lt, "<", "lt"), (Le, "<=", "le"))


def type_in_words(annotation: Any, metadata: Iterable[Any] = ()) -> str:
    """Return a type such as `Annotated[int, Field(ge=1)]` as `integer; >= 1`."""
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


# ---- Sentences for people out of pydantic's problems: the key, the value and what is allowed

BRANCHES = frozenset({"<one>", "<several>", "<number>", "<name>"})
"""Tags of the branches of a union, which pydantic puts into the path of a key."""
KIND_KEYS = ("kind", "source")
"""Keys that choose the class of a section."""

_UNKNOWN_KEY = {"extra_forbidden", "unexpected_keyword_argument"}
_EXPECTED = {
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "string": "a string",
    "list": "a list",
    "tuple": "a list",
    "model": "a mapping",
    "dict": "a mapping",
    "dataclass": "a mapping",
}


def describe(
    problem: Any,
    prefix: str = "",
    section: type[BaseModel] | None = None,
    known: Iterable[str] = (),
    values: Mapping[str, Any] | None = None,
) -> str:
    """Return one sentence for one pydantic problem."""
    path = tuple(part for part in problem["loc"] if part not in BRANCHES and part != "[key]")
    key = ".".join(str(part) for part in (*filter(None, [prefix]), *path))
    if problem["type"] in _UNKNOWN_KEY:
        keys = list(known) if section is None else keys_beside(section, path)
        kind = _kind(section, path, values)
        return f"{key}: unknown key{kind}, got {problem['input']!r}; {_listed(keys, bool(kind))}"
    if problem["type"] == "value_error":  # a sentence that begins with the rest of the key
        message = problem["msg"].removeprefix("Value error, ")
        return f"{key}.{message}" if key else str(message)
    if problem["type"] == "missing":
        return f"{key}: must be given{_kind(section, path, values)}"
    return f"{key}: must be {_expected(problem)}, got {problem['input']!r}"


def join_or(words: Iterable[str]) -> str:
    """Return `a, b or c`."""
    *most, last = words
    return f"{', '.join(most)} or {last}" if most else last


def keys_beside(section: type[BaseModel], path: tuple[int | str, ...]) -> list[str]:
    """Return the keys of the section in which a key lies."""
    inner: type[BaseModel] | None = section
    for part in path[:-1]:
        if isinstance(part, str) and inner is not None:
            field = inner.model_fields.get(part)
            inner = _section_in(field.annotation) if field else None
    return list(inner.model_fields) if inner else []


def _section_in(annotation: Any) -> type[BaseModel] | None:
    """Return the section in an annotation such as `list[ConfigSection] | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    sections = (_section_in(part) for part in get_args(annotation))
    return next((section for section in sections if section), None)


def _kind(
    section: type[BaseModel] | None, path: tuple[int | str, ...], values: Mapping[str, Any] | None
) -> str:
    """Return ` for kind 'iid'` if the key lies directly in a section with kinds."""
    if values is None or len(path) > 1:
        return ""
    if section is None:
        return f" for kind {values['kind']!r}"
    for key in KIND_KEYS:
        if key in section.model_fields:
            return f" for {key} {values.get(key, section.model_fields[key].default)!r}"
    return ""


def _listed(keys: list[str], kind: bool) -> str:
    names = ", ".join(keys) or "none"
    return f"its keys: {names}" if kind else f"allowed: {names}"


def _expected(problem: Any) -> str:
    kind = problem["type"]
    if kind.endswith(("_type", "_parsing", "_from_float", "_parsing_size")):
        return _EXPECTED.get(kind.partition("_")[0], _message(problem))
    return _message(problem)


def _message(problem: Any) -> str:
    if problem["type"] == "too_short":
        return f"a list of at least {problem['ctx']['min_length']}"
    if problem["type"] == "too_long":
        return f"a list of at most {problem['ctx']['max_length']}"
    if problem["type"] == "string_too_short":
        return "a string that is not empty"
    if problem["type"] == "invalid_key":
        return "a key that is a string"
    if problem["type"] == "less_than_equal":
        return f"at most {problem['ctx']['le']:g}"
    message: str = problem["msg"].removeprefix("Input should be ")
    message = message.replace("greater than or equal to", "at least")
    return message[0].lower() + message[1:]


# ---- The run directory: all files of a run, and the lock of the process that writes them

_log = logging.getLogger(__name__)


def flatten_keys(values: Any, prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one mapping with dotted keys.

    Example:
        >>> flatten_keys({"train": {"lr": 0.1}, "seed": 0})
        {'train.lr': 0.1, 'seed': 0}
    """
    if not isinstance(values, dict) or not values:
        return {prefix: values}
    flattened: dict[str, Any] = {}
    for key, value in values.items():
        flattened |= flatten_keys(value, f"{prefix}.{key}" if prefix else str(key))
    return flattened
