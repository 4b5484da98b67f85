"""Classes, functions and objects that were given in Python, by the names that configs hold."""

from __future__ import annotations

import copy
import hashlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from perdure.core.errors import bad_value

_GIVEN: dict[str, Any] = {}
_OBJECT = "given:"


def dotted_path(value: Any) -> str:
    """Return the dotted path of a class or function, by which this process finds it again."""
    path = f"{value.__module__}.{value.__qualname__}"
    if getattr(sys.modules.get(value.__module__), value.__qualname__, None) is not value:
        _GIVEN[path] = value
    else:
        _GIVEN.pop(path, None)  # an earlier class of this name, such as one of a cell run again
    return path


def kind_of(value: Any) -> Any:
    """Return what a config holds for a kind that was given in Python.

    A class or function is named by its dotted path, a module (a callable object with a
    `state_dict`) by a hash of its content. Everything else is returned unchanged.
    """
    if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
        return dotted_path(value)
    if callable(value) and hasattr(value, "state_dict"):
        kind = object_kind(value)
        _GIVEN[kind] = copy.deepcopy(value)
        return kind
    return value


def object_kind(module: Any) -> str:
    """Return the kind of a module: its class, a hash of its structure, and one of its values."""
    structure, values = hashlib.sha256(repr(module).encode()), hashlib.sha256()
    for name, value in module.state_dict().items():
        structure.update(f"|{name}|{value.dtype}|{tuple(value.shape)}".encode())
        values.update(value.detach().cpu().contiguous().numpy().tobytes())
    name = type(module).__name__
    return f"{_OBJECT}{name}-{structure.hexdigest()[:12]}-{values.hexdigest()[:12]}"


def give_again(kind: str, value: Any, exactly: bool = False) -> None:
    """Let a saved kind be found as a module or class that is given again.

    Args:
        kind: The kind of a saved config.
        value: The module, or its class. If None, nothing is given.
        exactly: Whether a module must have the values that it had; else its structure is enough.

    Raises:
        UserError: It is another one.
    """
    if value is None:
        return
    new = kind_of(value)
    same = new == kind or (
        not exactly and is_object(kind) and str(new).rpartition("-")[0] == kind.rpartition("-")[0]
    )
    if not same:
        raise bad_value("model", new, f"the one that the run was made with, {kind!r}")
    _GIVEN[kind] = value


def object_name(name: str, content: str) -> str:
    """Return the name of an object in a config, from its type and the hash of its content."""
    return f"{_OBJECT}{name}-{content[:12]}"


@contextmanager
def giving(name: str, value: Any) -> Iterator[None]:
    """Let an object be found under a name for a while."""
    _GIVEN[name] = value
    try:
        yield
    finally:
        _GIVEN.pop(name, None)


def is_object(kind: Any) -> bool:
    """Return whether a kind names an object that was given in Python."""
    return isinstance(kind, str) and kind.startswith(_OBJECT)


def find_given(kind: str) -> Any:
    """Return what was given in this process under a name, or None."""
    return _GIVEN.get(kind)
