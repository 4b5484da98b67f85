"""Trees: nested dicts and lists whose leaves are tensors or plain JSON values, and their bytes."""

from __future__ import annotations

import json
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from perdure.core.received import (
    DEEPEST,
    LONGEST_NAME,
    read_json,
    read_mapping,
    read_shape,
    read_text,
)

# ---- Trees: nested dicts and lists whose leaves are tensors or plain JSON values
#
# Everything that is sent or stored (server state, client states, messages) is such a tree, so that
# one pair of functions can save any of it without pickle.

Tensors = dict[str, Tensor]
"""Tensors by name, such as the parameters of a model."""
Tree = dict[str, Any]
"""A tree whose root is a dict."""

TENSOR_MARK = "__tensor__"
"""Key under which a skeleton names a tensor."""


def split_tree(tree: Any, prefix: str = "") -> tuple[Any, Tensors]:
    """Split a tree into a JSON skeleton and its tensors by path.

    Raises:
        TypeError: The tree holds a value of another type, or two keys with the same string.

    """
    if isinstance(tree, Tensor):
        return {TENSOR_MARK: prefix}, {prefix: tree.detach().cpu().contiguous()}
    if tree is None or isinstance(tree, bool | int | float | str):
        return tree, {}
    if not isinstance(tree, dict | list | tuple):
        raise TypeError(f"a tree cannot hold {type(tree).__name__} (at {prefix or 'its root'})")
    skeleton: dict[str, Any] = {}
    tensors: Tensors = {}
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        name = str(key)
        if name in skeleton or name == TENSOR_MARK:
            raise TypeError(f"a tree cannot hold equal keys or {TENSOR_MARK} (at {prefix!r})")
        # escaped, so that different tensors always have different paths
        step = name.replace("~", "~0").replace("/", "~1") or "~2"
        path = f"{prefix}/{step}" if prefix else step
        skeleton[name], below = split_tree(value, path)
        tensors.update(below)
    return (skeleton if isinstance(tree, dict) else list(skeleton.values())), tensors


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
    """Stack tensors along a new first axis; smaller ones are padded with zeros at the end."""
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


# ---- Trees as safetensors bytes: tensors are stored unchanged, all other values as JSON metadata

SUFFIX = ".safetensors"
_SKELETON = "tree"
_METADATA = "__metadata__"
_HEADER_SIZE_BYTES = 8
_MESSAGE_DTYPES = {"F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL"}


def encode(tree: Tree) -> bytes:
    """Return a tree as bytes. Decoding turns tuples into lists and all keys into strings."""
    skeleton, tensors = split_tree(tree)
    return save(_without_shared_memory(tensors), metadata={_SKELETON: json.dumps(skeleton)})


def decode(data: bytes) -> Tree:
    """Return the tree that `encode` made into these bytes.

    Raises:
        ValueError: The bytes are not an encoded tree.

    """
    try:
        tree: Tree = join_tree(json.loads(_metadata(data)[_SKELETON]), load(data))
    except Exception as error:  # safetensors, JSON and struct raise different errors
        raise ValueError(f"not a saved tree ({error!r})") from error
    return tree


def decode_message(data: bytes) -> Tree:
    """Return the tree in bytes that another machine sent.

    Memory is bounded by about ten times the size of the message, and by about 20 MB for small ones.

    Raises:
        ValueError: The bytes are not an encoded tree of real tensors, each with its own place in
            the tree; the header is ambiguous; or it would need far more memory than the message.

    """
    size = int.from_bytes(data[:_HEADER_SIZE_BYTES], "little")
    if not 0 < size <= len(data) - _HEADER_SIZE_BYTES:
        raise ValueError("the message is cut off")
    header = data[_HEADER_SIZE_BYTES : _HEADER_SIZE_BYTES + size]
    entries = read_mapping("header", read_json(header, len(data)))
    metadata = read_mapping("metadata", entries.pop(_METADATA, None), (_SKELETON,))
    for entry in entries.values():
        _check_tensor_entry(entry)
    skeleton = read_json(read_text("tree", metadata[_SKELETON], len(data)), len(data))
    if sorted(_tensor_names(read_mapping("tree", skeleton))) != sorted(entries):
        raise ValueError("every tensor must have one place in the tree")
    try:
        tree = join_tree(skeleton, load(data))
    except Exception as error:  # safetensors raises errors of several types
        raise ValueError(f"the tensors cannot be read ({type(error).__name__})") from None
    return read_mapping("tree", tree)


def _check_tensor_entry(entry: Any) -> None:
    values = read_mapping("tensor", entry, ("dtype", "shape", "data_offsets"))
    read_shape("shape", values["shape"])
    if read_text("dtype", values["dtype"]) not in _MESSAGE_DTYPES:
        raise ValueError(f"dtype: must be one of {', '.join(sorted(_MESSAGE_DTYPES))}")


def _tensor_names(skeleton: Any) -> list[str]:
    """Return the names of the tensors to which a skeleton refers."""
    if isinstance(skeleton, dict) and TENSOR_MARK in skeleton:
        name = read_mapping("tensor", skeleton, (TENSOR_MARK,))[TENSOR_MARK]
        return [read_text("tensor", name, DEEPEST * LONGEST_NAME)]
    if not isinstance(skeleton, dict | list):
        return []
    inner = skeleton.values() if isinstance(skeleton, dict) else skeleton
    return [name for value in inner for name in _tensor_names(value)]


def copy_tree(tree: Tree) -> Tree:
    """Return a copy as it would be after decoding; no tensor is a view of a larger one."""
    skeleton, tensors = split_tree(tree)
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    copied: Tree = join_tree(skeleton, copies)
    return copied


def _without_shared_memory(tensors: Tensors) -> Tensors:
    """Copy tensors that share memory with another one, which safetensors refuses to save."""
    seen: set[int] = set()
    result: Tensors = {}
    for name, tensor in tensors.items():
        address = tensor.untyped_storage().data_ptr()
        result[name] = tensor.clone() if address in seen else tensor
        seen.add(address)
    return result


def _metadata(data: bytes) -> dict[str, Any]:
    size = int.from_bytes(data[:_HEADER_SIZE_BYTES], "little")
    header = json.loads(data[_HEADER_SIZE_BYTES : _HEADER_SIZE_BYTES + size])
    metadata: dict[str, Any] = header["__metadata__"]
    return metadata
