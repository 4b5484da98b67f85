"""Sentences for people out of pydantic's problems: the key, the value and what is allowed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, get_args

from pydantic import BaseModel

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
    """Return one sentence for one pydantic problem.

    Args:
        problem: An entry of `ValidationError.errors()`.
        prefix: Key of what was validated.
        section: Class that was validated, which knows the keys that an unknown one may be.
        known: These keys, if there is no such class.
        values: What was validated; its kind is named if the section has several.
    """
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
