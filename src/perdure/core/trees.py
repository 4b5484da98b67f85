"""Trees: nested dicts and lists whose leaves are tensors or plain JSON values.

Everything that travels or is kept (server memory, client state, messages) is such a tree, so that
one pair of functions can save any of it without pickle.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Tensors = dict[str, Tensor]
Tree = dict[str, Any]

_TENSOR_MARK = "__tensor__"


def split_tree(tree: Any, prefix: str = "") -> tuple[Any, Tensors]:
    """Part a tree into a JSON skeleton and the tensors that it refers to by path."""
    if isinstance(tree, Tensor):
        return {_TENSOR_MARK: prefix}, {prefix: tree.detach().cpu().contiguous()}
    if isinstance(tree, dict):
        return _split_items(_with_text_keys(tree, prefix), prefix)
    if isinstance(tree, list | tuple):
        skeleton, tensors = _split_items({str(i): v for i, v in enumerate(tree)}, prefix)
        return list(skeleton.values()), tensors
    if tree is None or isinstance(tree, bool | int | float | str):
        return tree, {}
    raise TypeError(f"a tree cannot hold {type(tree).__name__} (at {prefix or 'its root'})")


def as_read(tree: Any) -> Any:
    """The tree as it comes back from disk, with its tensors where they are: text as keys, lists."""
    if isinstance(tree, Tensor):
        return tree.detach().contiguous()
    if isinstance(tree, dict):
        return {key: as_read(value) for key, value in _with_text_keys(tree, "").items()}
    return [as_read(value) for value in tree] if isinstance(tree, list | tuple) else tree


def _split_items(items: dict[str, Any], prefix: str) -> tuple[dict[str, Any], Tensors]:
    skeleton: dict[str, Any] = {}
    tensors: Tensors = {}
    for key, value in items.items():
        step = _step(key)
        skeleton[key], found = split_tree(value, f"{prefix}/{step}" if prefix else step)
        tensors.update(found)
    return skeleton, tensors


def _with_text_keys(tree: dict[Any, Any], prefix: str) -> dict[str, Any]:
    items = {str(key): value for key, value in tree.items()}
    if len(items) != len(tree) or _TENSOR_MARK in items:
        raise TypeError(f"a tree cannot hold two keys alike or {_TENSOR_MARK} (at {prefix!r})")
    return items


def _step(key: str) -> str:
    """A key as one step of a path: no two trees may give two tensors the same path."""
    return key.replace("~", "~0").replace("/", "~1") or "~2"


def join_tree(skeleton: Any, tensors: Tensors) -> Any:
    """The inverse of split_tree (tuples come back as lists)."""
    if isinstance(skeleton, dict):
        if set(skeleton) == {_TENSOR_MARK}:
            return tensors[skeleton[_TENSOR_MARK]]
        return {key: join_tree(value, tensors) for key, value in skeleton.items()}
    if isinstance(skeleton, list):
        return [join_tree(value, tensors) for value in skeleton]
    return skeleton


def to_device(tree: Any, device: torch.device) -> Any:
    """The same tree with its tensors on a device."""
    if isinstance(tree, Tensor):
        return tree.to(device)
    if isinstance(tree, dict):
        return {key: to_device(value, device) for key, value in tree.items()}
    if isinstance(tree, list):
        return [to_device(value, device) for value in tree]
    return tree


def add(a: Tensors, b: Tensors, scale: float = 1.0) -> Tensors:
    """A + scale * b over the names of b; names that only a has are kept as they are."""
    return a | {name: a[name].add(value, alpha=scale) for name, value in b.items()}


def subtract(a: Tensors, b: Tensors) -> Tensors:
    """A - b over the names of a."""
    return {name: value - b[name] for name, value in a.items()}


def scaled(values: Tensors, factor: float) -> Tensors:
    """All values times a factor; the same tensors where it is 1."""
    return values if factor == 1 else {name: value * factor for name, value in values.items()}


def column(values: Tensor, stack: Tensor) -> Tensor:
    """One value per client, shaped to be combined with a stack of clients' tensors."""
    return values.view(-1, *[1] * (stack.dim() - 1)).to(stack)
