"""Trees as safetensors bytes: tensors are stored unchanged, all other values as JSON metadata."""

from __future__ import annotations

import json
from typing import Any

from safetensors.torch import load, save

from perdure.core.received import (
    DEEPEST,
    LONGEST_NAME,
    read_json,
    read_mapping,
    read_shape,
    read_text,
)
from perdure.core.trees import TENSOR_MARK, Tensors, Tree, join_tree, split_tree

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
