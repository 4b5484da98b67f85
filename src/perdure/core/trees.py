"""Trees: nested dicts and lists whose leaves are tensors or plain JSON values.

Everything that is sent or stored (server state, client states, messages) is such a tree, so that
one pair of functions can save any of it without pickle.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Tensors = dict[str, Tensor]
"""Tensors by name, such as the parameters of a model."""
Tree = dict[str, Any]
"""A tree whose root is a dict."""

TENSOR_MARK = "__tensor__"
"""Key under which a skeleton names a tensor."""


def split_tree(tree: Any, prefix: str = "") -> tuple[Any, Tensors]:
    """Split a tree into a JSON skeleton and its tensors.

    Args:
        tree: Dicts, lists and tuples of tensors, strings, numbers, booleans and None.
        prefix: Path of the tree's root, with "/" between keys.

    Returns:
        The skeleton, and the tensors on the CPU by the paths that the skeleton refers to.

    Raises:
        TypeError: The tree holds a value of another type, or two keys with the same string.
    """
    if isinstance(tree, Tensor):
        return {TENSOR_MARK: prefix}, {prefix: tree.detach().cpu().contiguous()}
    if isinstance(tree, dict):
        return _split_items(_with_string_keys(tree, prefix), prefix)
    if isinstance(tree, list | tuple):
        skeleton, tensors = _split_items({str(i): v for i, v in enumerate(tree)}, prefix)
        return list(skeleton.values()), tensors
    if tree is None or isinstance(tree, bool | int | float | str):
        return tree, {}
    raise TypeError(f"a tree cannot hold {type(tree).__name__} (at {prefix or 'its root'})")


def as_decoded(tree: Any) -> Any:
    """Return the tree as it would be after encoding and decoding, without copying tensors.

    Keys become strings, tuples become lists, and tensors become contiguous.
    """
    if isinstance(tree, Tensor):
        return tree.detach().contiguous()
    if isinstance(tree, dict):
        return {key: as_decoded(value) for key, value in _with_string_keys(tree, "").items()}
    return [as_decoded(value) for value in tree] if isinstance(tree, list | tuple) else tree


def _split_items(items: dict[str, Any], prefix: str) -> tuple[dict[str, Any], Tensors]:
    skeleton: dict[str, Any] = {}
    tensors: Tensors = {}
    for key, value in items.items():
        step = _path_step(key)
        path = f"{prefix}/{step}" if prefix else step
        skeleton[key], value_tensors = split_tree(value, path)
        tensors.update(value_tensors)
    return skeleton, tensors


def _with_string_keys(tree: dict[Any, Any], prefix: str) -> dict[str, Any]:
    items = {str(key): value for key, value in tree.items()}
    if len(items) != len(tree) or TENSOR_MARK in items:
        raise TypeError(f"a tree cannot hold equal keys or {TENSOR_MARK} (at {prefix!r})")
    return items


def _path_step(key: str) -> str:
    """Escape a key, so that different tensors always have different paths."""
    return key.replace("~", "~0").replace("/", "~1") or "~2"


def join_tree(skeleton: Any, tensors: Tensors) -> Any:
    """Return the tree that `split_tree` split, with lists instead of tuples."""
    if isinstance(skeleton, dict):
        if set(skeleton) == {TENSOR_MARK}:
            return tensors[skeleton[TENSOR_MARK]]
        return {key: join_tree(value, tensors) for key, value in skeleton.items()}
    if isinstance(skeleton, list):
        return [join_tree(value, tensors) for value in skeleton]
    return skeleton


def to_device(tree: Any, device: torch.device) -> Any:
    """Return the tree with its tensors on a device."""
    if isinstance(tree, Tensor):
        return tree.to(device)
    if isinstance(tree, dict):
        return {key: to_device(value, device) for key, value in tree.items()}
    if isinstance(tree, list):
        return [to_device(value, device) for value in tree]
    return tree


def add(a: Tensors, b: Tensors, scale: float = 1.0) -> Tensors:
    """Return a + scale * b over the names of b; names that only a has keep their tensor."""
    return a | {name: a[name].add(value, alpha=scale) for name, value in b.items()}


def subtract(a: Tensors, b: Tensors) -> Tensors:
    """Return a - b over the names of a."""
    return {name: value - b[name] for name, value in a.items()}


def scaled(values: Tensors, factor: float) -> Tensors:
    """Return all values times a factor; if it is 1, the same tensors."""
    return values if factor == 1 else {name: value * factor for name, value in values.items()}


def pad_stack(values: list[Tensor]) -> Tensor:
    """Stack tensors along a new first axis; smaller ones are padded with zeros at the end.

    Args:
        values: Tensors with equally many axes.
    """
    if all(value.shape == values[0].shape for value in values):
        return torch.stack(values)
    shape = [max(extents) for extents in zip(*(value.shape for value in values), strict=True)]
    stack = values[0].new_zeros(len(values), *shape)
    for row, value in zip(stack, values, strict=True):
        row[tuple(slice(extent) for extent in value.shape)] = value
    return stack


def per_client(values: Tensor, stack: Tensor) -> Tensor:
    """Return one value per client, [K], in a shape that broadcasts against a stack, [K, ...]."""
    return values.view(-1, *[1] * (stack.dim() - 1)).to(stack)
