"""Trees as safetensors bytes: tensors as they are, everything else as JSON in the metadata."""

from __future__ import annotations

import json
from typing import Any

from safetensors.torch import load, save

from perdure.core.trees import Tensors, Tree, join_tree, split_tree

SUFFIX = ".safetensors"
_SKELETON = "tree"
_HEADER_SIZE_BYTES = 8


def encode(tree: Tree) -> bytes:
    """A tree as bytes. Tuples come back as lists and keys that are not text as text."""
    skeleton, tensors = split_tree(tree)
    return save(_apart(tensors), metadata={_SKELETON: json.dumps(skeleton)})


def decode(data: bytes) -> Tree:
    """The tree of some bytes; ValueError if they are none."""
    try:
        tree: Tree = join_tree(json.loads(_metadata(data)[_SKELETON]), load(data))
    except Exception as error:  # safetensors, JSON and struct each have errors of their own
        raise ValueError(f"not a saved tree ({error!r})") from error
    return tree


def copy_tree(tree: Tree) -> Tree:
    """The tree as it would come back from disk, in memory of its own: no views of larger stacks."""
    skeleton, tensors = split_tree(tree)
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    copied: Tree = join_tree(skeleton, copies)
    return copied


def _apart(tensors: Tensors) -> Tensors:
    """Copies of tensors that share memory with another one, which safetensors refuses to save."""
    seen: set[int] = set()
    result: Tensors = {}
    for name, tensor in tensors.items():
        place = tensor.untyped_storage().data_ptr()
        result[name] = tensor.clone() if place in seen else tensor
        seen.add(place)
    return result


def _metadata(data: bytes) -> dict[str, Any]:
    size = int.from_bytes(data[:_HEADER_SIZE_BYTES], "little")
    header = json.loads(data[_HEADER_SIZE_BYTES : _HEADER_SIZE_BYTES + size])
    metadata: dict[str, Any] = header["__metadata__"]
    return metadata
