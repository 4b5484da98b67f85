"""What a method keeps between rounds, typed: dataclasses of tensors and plain values.

A state is saved and sent as a tree (nested dicts of tensors and plain values) and comes back
checked against the annotations of its dataclass.
"""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Any

from torch import Tensor

from perdure.contract.checks import ContractError, refuse


@dataclass(frozen=True)
class Nothing:
    """A state without fields: the method keeps nothing."""


def to_tree(state: Any, where: str = "state") -> Any:
    """Return a state as a tree that can be saved.

    Args:
        state: A dataclass, mapping, list, tensor or plain value, nested at will.
        where: What the sentence names if the state holds anything else.
    """
    if is_dataclass(state) and not isinstance(state, type):
        return {f.name: to_tree(getattr(state, f.name), f"{where}.{f.name}") for f in fields(state)}
    if isinstance(state, Mapping):
        return {str(key): to_tree(value, f"{where}[{key!r}]") for key, value in state.items()}
    if isinstance(state, list | tuple):
        return [to_tree(value, f"{where}[{i}]") for i, value in enumerate(state)]
    if state is None or isinstance(state, Tensor | bool | int | float | str):
        return state
    refuse(where, f"a {type(state).__name__}", "tensors, numbers, strings, lists, dicts and None")


def from_tree(kind: Any, tree: Any, where: str = "state") -> Any:
    """Return the state of type `kind` that `to_tree` gave as `tree`; refuse any other tree."""
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


def partial_from_tree(kind: Any, tree: Mapping[str, Any], where: str = "state") -> Any:
    """Return a state with the fields that `tree` has, and defaults for all others."""
    hints = _hints(kind)
    named = {re.sub(r"\W", "_", name): value for name, value in tree.items()}  # special-c
    known = {name: value for name, value in named.items() if name in hints}
    values = {name: _partial(hints[name], v, f"{where}.{name}") for name, v in known.items()}
    return kind(**values)


def _partial(kind: Any, tree: Any, where: str) -> Any:
    part = partial_from_tree if is_dataclass(kind) else from_tree
    return part(kind, tree, where)


@cache
def _hints(kind: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {f.name: hints[f.name] for f in fields(kind)}


def _dataclass(kind: Any, tree: Any, where: str) -> Any:
    hints = _hints(kind)
    if not isinstance(tree, Mapping) or set(tree) != set(hints):
        got = sorted(tree) if isinstance(tree, Mapping) else f"a {type(tree).__name__}"
        refuse(f"{where} ({kind.__name__})", got, f"the fields {sorted(hints)}")
    return kind(**{n: from_tree(hint, tree[n], f"{where}.{n}") for n, hint in hints.items()})


def _union(kinds: tuple[Any, ...], tree: Any, where: str) -> Any:
    for kind in kinds:
        try:
            return from_tree(kind, tree, where)
        except ContractError:
            continue
    names = " or ".join(getattr(kind, "__name__", str(kind)) for kind in kinds)
    refuse(where, f"a {type(tree).__name__}", names)


def _dict(arguments: tuple[Any, ...], tree: Any, where: str) -> dict[Any, Any]:
    if not isinstance(tree, Mapping):
        refuse(where, f"a {type(tree).__name__}", "a dict")
    key, value = arguments
    return {key(k): from_tree(value, v, f"{where}[{k!r}]") for k, v in tree.items()}


def _sequence(origin: Any, arguments: tuple[Any, ...], tree: Any, where: str) -> Any:
    if not isinstance(tree, list | tuple):
        refuse(where, f"a {type(tree).__name__}", "a list")
    return origin(from_tree(arguments[0], v, f"{where}[{i}]") for i, v in enumerate(tree))


def _plain(kind: Any, tree: Any, where: str) -> Any:
    if kind is float and isinstance(tree, int) and not isinstance(tree, bool):
        return float(tree)
    if kind is Any or isinstance(tree, kind):
        return tree
    refuse(where, f"a {type(tree).__name__}", getattr(kind, "__name__", str(kind)))
