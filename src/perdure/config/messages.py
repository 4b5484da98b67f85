"""Sentences for people out of pydantic's problems: the key, the value and what is allowed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, get_args

from pydantic import BaseModel

CHOICES = frozenset({"<one>", "<several>"})
"""Tags of the branches of a union, which pydantic puts into the path of a key."""

_UNKNOWN_KEY = {"extra_forbidden", "unexpected_keyword_argument"}
_ALLOWED = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "text",
    "list": "a list",
    "model": "a section with keys of its own",
    "dict": "a section with keys of its own",
    "dataclass": "a section with keys of its own",
}


def describe(problem: Any, prefix: str = "", known: Iterable[str] = ()) -> str:
    """One sentence for one pydantic problem; `known` are the keys that an unknown one may be."""
    parts = [part for part in problem["loc"] if part not in CHOICES and part != "[key]"]
    key = ".".join(str(part) for part in (*filter(None, [prefix]), *parts))
    if problem["type"] in _UNKNOWN_KEY:
        keys = ", ".join(known)
        return f"{key}: unknown key with value {problem['input']!r}" + (
            f", allowed: {keys}" if keys else ""
        )
    if problem["type"] == "value_error":  # our own sentence, which names the last key itself
        message = problem["msg"].removeprefix("Value error, ")
        return f"{key}.{message}" if key else str(message)
    if problem["type"] == "missing":
        return f"{key}: is missing, allowed: a value"
    return f"{key}: must be {_allowed(problem)}, got {problem['input']!r}"


def keys_beside(model: type[BaseModel], place: tuple[int | str, ...]) -> list[str]:
    """The keys of the section of a config in which a key lies."""
    section: type[BaseModel] | None = model
    for part in place[:-1]:
        if isinstance(part, str) and section is not None:
            field = section.model_fields.get(part)
            section = _section_in(field.annotation) if field else None
    return list(section.model_fields) if section else []


def _section_in(annotation: Any) -> type[BaseModel] | None:
    """The section that an annotation such as `list[ConfigSection] | None` speaks of."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    found = (_section_in(part) for part in get_args(annotation))
    return next((section for section in found if section), None)


def _allowed(problem: Any) -> str:
    kind = problem["type"]
    if kind.endswith(("_type", "_parsing", "_from_float", "_parsing_size")):
        return _ALLOWED.get(kind.partition("_")[0], _message(problem))
    return _message(problem)


def _message(problem: Any) -> str:
    if problem["type"] == "too_short":
        return f"at least {problem['ctx']['min_length']} of them"
    if problem["type"] == "less_than_equal":
        return f"at most {problem['ctx']['le']:g}"
    message: str = problem["msg"].removeprefix("Input should be ")
    message = message.replace("greater than or equal to", "at least")
    return message[0].lower() + message[1:]
