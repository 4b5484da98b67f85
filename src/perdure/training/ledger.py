"""The byte ledger: encoded size of everything that is sent, by direction, field and task."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from perdure.contract.uploads import StackedUploads, Sum
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
    """Return len(encode(value)) without encoding."""
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


def _no_clients() -> Tensor:
    return torch.zeros(2, 0, dtype=torch.int64)


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
    task_fields: list[dict[str, int]] = field(default_factory=list)
    """`by_field` of each task."""
    task_clients: list[dict[str, Any]] = field(default_factory=list)
    """The section `per_client` of each finished task."""
    kept: list[dict[str, float] | None] = field(default_factory=list)
    """Mean and maximum over clients of the bytes that a client stores after each task; None in a
    federation, where it is not known."""
    sent_in_task: Tensor = field(default_factory=_no_clients, compare=False)
    """Bytes of the current task up and down by client, int64 [2, clients so far]."""
    sent_before: Tensor = field(default_factory=_no_clients, compare=False)
    """Bytes of all finished tasks up and down by client, int64 [2, clients so far]."""

    def __post_init__(self) -> None:
        self.sent_in_task, self.sent_before = self.sent_in_task.cpu(), self.sent_before.cpu()

    def begin_task(self) -> None:
        """Start to count the bytes of a new task."""
        self.by_task.append({"up": 0, "down": 0})
        self.task_fields.append({})
        self.delivered = {}

    def end_task(self, stored: Sequence[int] | None, clients: int) -> None:
        """Close the counts of a task."""
        self.kept.append(None if stored is None else _mean_and_max(stored, clients))
        self.task_clients.append(per_client(self.sent_in_task))
        self.sent_before = _added(self.sent_before, self.sent_in_task)
        self.sent_in_task = _no_clients()

    def count_uploads(self, uploads: StackedUploads) -> None:
        """Count the fields of uploads."""
        for name, upload_field in uploads.fields.items():
            size = encoded_size(upload_field.value, stacked=True)
            self.add_bytes("up", name, dict.fromkeys(uploads.clients, size))
            self.types[name] = "Sum" if isinstance(upload_field, Sum) else "Each"

    def count_broadcast(self, fields: Mapping[str, tuple[Tree, bool]], clients: list[int]) -> None:
        """Count a broadcast: by name a tree, and whether clients receive it once per task."""
        for name, (value, once) in fields.items():
            if not value:
                continue
            receivers = self.first_deliveries(name, clients) if once else clients
            if receivers:
                size = encoded_size(split_tree(value)[1])
                self.add_bytes("down", name, dict.fromkeys(receivers, size))

    def first_deliveries(self, name: str, clients: list[int]) -> list[int]:
        """Return the clients that have not received a field in this task, and record them."""
        earlier = set(self.delivered.get(name, []))
        self.delivered[name] = sorted(earlier.union(clients))
        return [client for client in clients if client not in earlier]

    def add_bytes(self, direction: str, name: str, sizes: Mapping[int, int]) -> None:
        """Add the bytes of a field."""
        size, key = sum(sizes.values()), f"{direction}/{name}"
        setattr(self, direction, getattr(self, direction) + size)
        self.by_task[-1][direction] += size
        self.by_field[key] = self.by_field.get(key, 0) + size
        fields = self.task_fields[-1]
        fields[key] = fields.get(key, 0) + size
        if not sizes:
            return
        if max(sizes) >= self.sent_in_task.shape[1]:
            self.sent_in_task = _widened(self.sent_in_task, max(sizes) + 1)
        row = ("up", "down").index(direction)
        self.sent_in_task[row, list(sizes)] += torch.tensor(list(sizes.values()))

    def summary(self) -> dict[str, Any]:
        """Return the `bytes` section of result.json."""
        everything = _added(self.sent_before, self.sent_in_task)
        return {
            "up": self.up, "down": self.down, "by_task": self._tasks(), "by_field": self.by_field,
            "types": self.types, "per_client": per_client(everything),
            "kept": self._kept_summary(),
        }  # fmt: skip

    def _tasks(self) -> list[dict[str, Any]]:
        running = [None] * (len(self.by_task) - len(self.task_clients))
        parts = zip(self.by_task, self.task_fields, [*self.task_clients, *running], strict=True)
        return [{**sent, "by_field": named, "per_client": each} for sent, named, each in parts]

    def _kept_summary(self) -> dict[str, Any] | None:
        """Return mean and maximum after the last task, and after each as `by_task`."""
        last = self.kept[-1] if self.kept else None
        return None if last is None else {**last, "by_task": self.kept}


def per_client(sent: Tensor) -> dict[str, Any]:
    """Return mean and maximum of the bytes per client, over the clients that took part.

    Args:
        sent: Bytes up and down by client, int64 [2, clients].

    """
    present = sent[:, sent.any(dim=0)]
    columns = {name: present[row].tolist() for row, name in enumerate(("up", "down"))}
    return {"clients": present.shape[1]} | {
        name: _mean_and_max(sizes, len(sizes)) for name, sizes in columns.items()
    }


def _mean_and_max(sizes: Sequence[int], clients: int) -> dict[str, float]:
    return {"mean": sum(sizes) / max(1, clients), "max": max(sizes, default=0)}


def _widened(sent: Tensor, clients: int) -> Tensor:
    missing = max(0, clients - sent.shape[1])
    return torch.nn.functional.pad(sent, (0, missing)) if missing else sent


def _added(a: Tensor, b: Tensor) -> Tensor:
    clients = max(a.shape[1], b.shape[1])
    return _widened(a, clients) + _widened(b, clients)
