"""Trees as safetensors bytes: tensors are stored unchanged, all other values as JSON metadata."""

from __future__ import annotations

import json
from typing import Any

from safetensors.torch import load, save

from perdure.core.trees import Tensors, Tree, join_tree, split_tree

SUFFIX = ".safetensors"
_SKELETON = "tree"
_HEADER_SIZE_BYTES = 8


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
