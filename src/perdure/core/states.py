"""Server and client states of a method: dataclasses of tensors and plain values.

A state is saved and sent as a tree (nested dicts of tensors and plain values). When it is read, it
is checked against the annotations of its dataclass.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

from torch import Tensor

from perdure.core.errors import ContractError, refuse, type_name, with_article


def to_tree(state: Any, where: str = "state") -> Any:
    """Return a state as a tree that can be saved.

    Args:
        state: A dataclass, mapping, list, tensor or plain value, nested to any depth.
        where: Name of the state in an error message.

    """
    if is_dataclass(state) and not isinstance(state, type):
        return {f.name: to_tree(getattr(state, f.name), f"{where}.{f.name}") for f in fields(state)}
    if isinstance(state, Mapping):
        return {str(key): to_tree(value, f"{where}[{key!r}]") for key, value in state.items()}
    if isinstance(state, list | tuple):
        return [to_tree(value, f"{where}[{i}]") for i, value in enumerate(state)]
    if isinstance(state, Tensor):
        return state.detach().contiguous() if _is_computed(state) else state
    if state is None or isinstance(state, bool | int | float | str):
        return state
    refuse(
        where,
        type_name(state),
        "made of tensors, numbers, strings, lists, dicts and None",
    )


def _is_computed(tensor: Tensor) -> bool:
    """Return whether a tensor has a gradient or a layout that saving would not keep."""
    return tensor.requires_grad or not tensor.is_contiguous()


def from_tree(kind: Any, tree: Any, where: str = "state") -> Any:
    """Return the state that `to_tree` turned into `tree`; refuse any other tree.

    Args:
        kind: Type of the state: a dataclass, or an annotation of one of its fields.
        tree: The tree.
        where: Name of the state in an error message.

    """
    if is_dataclass(kind):
        return _dataclass(kind, tree, where)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return _union(arguments, tree, where)
    if origin is dict:
        return _dict(arguments, tree, where)
    if origin in (list, tuple):
        return _sequence(origin, arguments, tree, where)
    return _plain(kind, tree, where)


def as_saved(kind: Any, state: Any, where: str = "state") -> Any:
    """Return a state with its tensors detached and contiguous, as they are when they are read.

    A state that differs in anything else from what would be read is refused: a run that was stopped
    would not continue as one that was not.
    """
    saved = from_tree(kind, to_tree(state, where), where)
    _check_same(state, saved, where)
    return saved


def _check_same(state: Any, restored: Any, where: str) -> None:
    if type(state) is not type(restored):
        refuse(where, type_name(state), f"{type_name(restored)}, as it is read from a checkpoint")
    if is_dataclass(state):
        for f in fields(state):
            _check_same(getattr(state, f.name), getattr(restored, f.name), f"{where}.{f.name}")
    elif isinstance(state, dict):
        if list(state) != list(restored):
            refuse(where, f"keys {list(state)}", f"keys {list(restored)}, as they are read again")
        for key, value in state.items():
            _check_same(value, restored[key], f"{where}[{key!r}]")
    elif isinstance(state, list | tuple):
        for i, (value, again) in enumerate(zip(state, restored, strict=True)):
            _check_same(value, again, f"{where}[{i}]")


def partial_from_tree(kind: Any, tree: Mapping[str, Any], where: str = "state") -> Any:
    """Return a state with the fields of `tree`, and default values for all others.

    Args:
        kind: Type of the state, a dataclass.
        tree: Some of its fields.
        where: Name of the state in an error message.

    """
    hints = _hints(kind)
    unknown = next((name for name in tree if name not in hints), None)
    if unknown is not None:
        refuse(f"{where} ({kind.__name__})", unknown, f"some of the fields {sorted(hints)}")
    return kind(**{n: _partial(hints[n], value, f"{where}.{n}") for n, value in tree.items()})


def _partial(kind: Any, tree: Any, where: str) -> Any:
    read = partial_from_tree if is_dataclass(kind) else from_tree
    return read(kind, tree, where)


@cache
def _hints(kind: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {f.name: hints[f.name] for f in fields(kind)}


def _dataclass(kind: Any, tree: Any, where: str) -> Any:
    hints = _hints(kind)
    if not isinstance(tree, Mapping) or set(tree) != set(hints):
        got = sorted(tree) if isinstance(tree, Mapping) else type_name(tree)
        refuse(f"{where} ({kind.__name__})", got, f"a dict with the fields {sorted(hints)}")
    return kind(**{n: from_tree(hint, tree[n], f"{where}.{n}") for n, hint in hints.items()})


def _union(kinds: tuple[Any, ...], tree: Any, where: str) -> Any:
    for kind in kinds:
        try:
            return from_tree(kind, tree, where)
        except ContractError:
            continue
    names = " or ".join(
        "None" if kind is type(None) else with_article(getattr(kind, "__name__", str(kind)))
        for kind in kinds
    )
    refuse(where, type_name(tree), names)


def _dict(arguments: tuple[Any, ...], tree: Any, where: str) -> dict[Any, Any]:
    if not isinstance(tree, Mapping):
        refuse(where, type_name(tree), "a dict")
    key, value = arguments
    return {key(k): from_tree(value, v, f"{where}[{k!r}]") for k, v in tree.items()}


def _sequence(origin: Any, arguments: tuple[Any, ...], tree: Any, where: str) -> Any:
    if not isinstance(tree, list | tuple):
        refuse(where, type_name(tree), "a list")
    return origin(from_tree(arguments[0], v, f"{where}[{i}]") for i, v in enumerate(tree))


def _plain(kind: Any, tree: Any, where: str) -> Any:
    if kind is float and isinstance(tree, int) and not isinstance(tree, bool):
        return float(tree)
    if kind is Any or isinstance(tree, kind):
        return tree
    refuse(where, type_name(tree), with_article(getattr(kind, "__name__", str(kind))))
