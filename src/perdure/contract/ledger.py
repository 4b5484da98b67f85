"""The byte ledger: what would be encoded on the wire, up and down, by field and by task."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any

from safetensors.torch import save
from torch import Tensor

from perdure.contract.upload_collector import FailedUpload, StackedUploads
from perdure.core.trees import Tensors, Tree, split_tree

_DTYPES = {
    "torch.uint64": "U64", "torch.int64": "I64", "torch.float64": "F64", "torch.complex64": "C64",
    "torch.float32": "F32", "torch.uint32": "U32", "torch.int32": "I32", "torch.bfloat16": "BF16",
    "torch.float16": "F16", "torch.uint16": "U16", "torch.int16": "I16", "torch.int8": "I8",
    "torch.uint8": "U8", "torch.bool": "BOOL",
}  # fmt: skip
"""Types in the order in which safetensors lays them out."""
_PLACES = {dtype: place for place, dtype in enumerate(_DTYPES)}


def encode(value: Tensors) -> bytes:
    """A field as it travels: one safetensors block."""
    return save({name: tensor.contiguous() for name, tensor in value.items()})


def encoded_size(value: Tensors, stacked: bool = False) -> int:
    """len(encode(value)) without encoding; `stacked` leaves a leading client axis out."""
    shapes = {name: list(t.shape[1:] if stacked else t.shape) for name, t in value.items()}
    order = sorted(value, key=lambda name: (_PLACES[str(value[name].dtype)], name))
    header, offset = {}, 0
    for name in order:
        end = offset + math.prod(shapes[name]) * value[name].element_size()
        dtype = _DTYPES[str(value[name].dtype)]
        header[name] = {"dtype": dtype, "shape": shapes[name], "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    return 8 + (len(text) + 7) // 8 * 8 + offset


def flat(tree: Tree | Tensors) -> Tensors:
    """The tensors of a tree by path, as one field of a message."""
    return split_tree(tree)[1]


@dataclass
class Ledger:
    """Bytes so far. A broadcast part that holds for a whole task is counted once a client."""

    up: int = 0
    down: int = 0
    by_task: list[dict[str, int]] = field(default_factory=list)
    by_field: dict[str, int] = field(default_factory=dict)
    types: dict[str, str] = field(default_factory=dict)
    """Each uploaded field as Sum or Each: what the server needs to see of it."""
    delivered: dict[str, list[int]] = field(default_factory=dict)
    """Clients that already hold the current task's lasting parts."""

    def begin_task(self) -> None:
        """Open a new task's account."""
        self.by_task.append({"up": 0, "down": 0})
        self.delivered = {}

    def receive(self, uploads: StackedUploads | FailedUpload) -> None:
        """Count what clients sent, as far as it was of use."""
        if isinstance(uploads, FailedUpload):
            return
        for name, part in uploads.fields.items():
            size = encoded_size(part.value, stacked=True) * len(uploads.clients)
            self.count("up", name, size)
            self.types[name] = type(part).__name__

    def send(self, name: str, value: Tree | Tensors, clients: list[int], lasting: bool) -> None:
        """Count a broadcast field to these clients."""
        if not value:
            return
        if lasting:
            clients = self.newcomers(name, clients)
        if clients:
            self.count("down", name, encoded_size(flat(value)) * len(clients))

    def newcomers(self, name: str, clients: list[int]) -> list[int]:
        """Those of the clients that did not have a lasting part yet; from now on they have it."""
        held = set(self.delivered.get(name, []))
        self.delivered[name] = sorted(held.union(clients))
        return [client for client in clients if client not in held]

    def count(self, way: str, name: str, size: int) -> None:
        """Enter bytes of a field: `way` is up or down."""
        setattr(self, way, getattr(self, way) + size)
        self.by_task[-1][way] += size
        key = f"{way}/{name}"
        self.by_field[key] = self.by_field.get(key, 0) + size

    def summary(self) -> dict[str, Any]:
        """The `bytes` section of result.json."""
        return {
            "up": self.up, "down": self.down, "by_task": self.by_task, "by_field": self.by_field,
            "types": self.types,
        }  # fmt: skip


def is_tensor_tree(tree: Any) -> bool:
    """Whether a tree holds tensors only at its leaves (plain values do not travel)."""
    if isinstance(tree, dict):
        return all(is_tensor_tree(value) for value in tree.values())
    return isinstance(tree, Tensor)
