"""The byte ledger: encoded size of everything that is sent, by direction, field and task."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any

from safetensors.torch import save

from perdure.contract.upload_collector import FailedUpload, StackedUploads
from perdure.contract.uploads import Sum
from perdure.core.trees import Tensors, Tree, split_tree

_DTYPES = {
    "torch.uint64": "U64", "torch.int64": "I64", "torch.float64": "F64", "torch.complex64": "C64",
    "torch.float32": "F32", "torch.uint32": "U32", "torch.int32": "I32", "torch.bfloat16": "BF16",
    "torch.float16": "F16", "torch.uint16": "U16", "torch.int16": "I16", "torch.int8": "I8",
    "torch.uint8": "U8", "torch.bool": "BOOL",
}  # fmt: skip
"""Types in the order in which safetensors stores them."""
_DTYPE_ORDER = {dtype: position for position, dtype in enumerate(_DTYPES)}


def encode(value: Tensors) -> bytes:
    """Return a field as it is sent: one safetensors block."""
    return save({name: tensor.contiguous() for name, tensor in value.items()})


def encoded_size(value: Tensors, stacked: bool = False) -> int:
    """Return len(encode(value)) without encoding.

    Args:
        value: Tensors by name.
        stacked: Whether the tensors have a leading client axis; it is not counted, so that the
            result is the size per client.
    """
    shapes = {name: list(t.shape[1:] if stacked else t.shape) for name, t in value.items()}
    order = sorted(value, key=lambda name: (_DTYPE_ORDER[str(value[name].dtype)], name))
    header, offset = {}, 0
    for name in order:
        end = offset + math.prod(shapes[name]) * value[name].element_size()
        dtype = _DTYPES[str(value[name].dtype)]
        header[name] = {"dtype": dtype, "shape": shapes[name], "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    return 8 + (len(text) + 7) // 8 * 8 + offset


def flatten_tree(tree: Tree | Tensors) -> Tensors:
    """Return the tensors of a tree by path, as one field of a message."""
    return split_tree(tree)[1]


@dataclass
class Ledger:
    """Bytes sent so far. A once-per-task field is counted once per client and task."""

    up: int = 0
    """Bytes from clients to the server."""
    down: int = 0
    """Bytes from the server to clients."""
    by_task: list[dict[str, int]] = field(default_factory=list)
    """`up` and `down` of each task."""
    by_field: dict[str, int] = field(default_factory=dict)
    """Bytes by `up/NAME` and `down/NAME`."""
    types: dict[str, str] = field(default_factory=dict)
    """`Sum` or `Each` by name of the uploaded field."""
    delivered: dict[str, list[int]] = field(default_factory=dict)
    """By name of a once-per-task field, the clients that have received it in the current task."""

    def begin_task(self) -> None:
        """Start to count the bytes of a new task."""
        self.by_task.append({"up": 0, "down": 0})
        self.delivered = {}

    def count_uploads(self, uploads: StackedUploads | FailedUpload) -> None:
        """Count uploads; failed ones count as nothing."""
        if isinstance(uploads, FailedUpload):
            return
        for name, upload_field in uploads.fields.items():
            size = encoded_size(upload_field.value, stacked=True) * len(uploads.clients)
            self.add_bytes("up", name, size)
            self.types[name] = "Sum" if isinstance(upload_field, Sum) else "Each"

    def count_broadcast(
        self, name: str, value: Tree | Tensors, clients: list[int], once_per_task: bool
    ) -> None:
        """Count a broadcast field.

        Args:
            name: Name of the field.
            value: Its tensors.
            clients: The clients that receive it.
            once_per_task: Whether clients that have received it in this task are not counted again.
        """
        if not value:
            return
        if once_per_task:
            clients = self.first_deliveries(name, clients)
        if clients:
            self.add_bytes("down", name, encoded_size(flatten_tree(value)) * len(clients))

    def first_deliveries(self, name: str, clients: list[int]) -> list[int]:
        """Return the clients that have not received a field in this task, and record them."""
        earlier = set(self.delivered.get(name, []))
        self.delivered[name] = sorted(earlier.union(clients))
        return [client for client in clients if client not in earlier]

    def add_bytes(self, direction: str, name: str, size: int) -> None:
        """Add the bytes of a field; `direction` is "up" or "down"."""
        setattr(self, direction, getattr(self, direction) + size)
        self.by_task[-1][direction] += size
        key = f"{direction}/{name}"
        self.by_field[key] = self.by_field.get(key, 0) + size

    def summary(self) -> dict[str, Any]:
        """Return the `bytes` section of result.json."""
        return {
            "up": self.up, "down": self.down, "by_task": self.by_task, "by_field": self.by_field,
            "types": self.types,
        }  # fmt: skip
