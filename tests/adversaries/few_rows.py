"""Federations of nodes with own digits, one of which has few rows, and a server that is curious.

Node 0 is the victim. The server keeps every reply as it left the nodes, and the sums that it opens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from in_process import InProcessTransport, in_process_engine
from sklearn.datasets import load_digits

from perdure.federation.messages import unpack
from perdure.federation.node.policy import NodePolicy
from perdure.runs.run import run
from perdure.training.collector import UploadCollector

CLASSES = [str(digit) for digit in range(10)]
MEAN, STD = 0.3, 0.38
NODES = 4
CONFIG: dict[str, Any] = {
    "seed": 3,
    "stream": {"kind": "split", "tasks": 1},
    "clients": {"count": NODES},
    "model": {"kind": "mlp", "hidden": [32]},
    "train": {"rounds": 1, "batch_size": 64, "local_epochs": 1, "lr": 0.1},
    "data": {"mean": [MEAN], "std": [STD]},
    "engine": {"kind": "flower"},
    "federation": {"classes": CLASSES, "shape": [1, 8, 8], "tasks": [CLASSES]},
    "device": "cpu",
}
OPEN = {"code": "any", "files": "any", "min_rows": 0}
"""A policy that withholds nothing: here every attack succeeds."""
DEFAULT = {"code": "any", "files": "any"}
"""The policy of a node whose owner says nothing about rows."""

_DIGITS = load_digits()
IMAGES = np.rint(_DIGITS.images * (255 / 16)).astype(np.uint8)
LABELS = _DIGITS.target


def digits(first: int, count: int, classes: tuple[int, ...] = tuple(range(10))) -> list[int]:
    """Return `count` rows of the digits of some classes, from row `first` on."""
    rows = [row for row in range(first, len(LABELS)) if LABELS[row] in classes]
    return rows[:count]


def network_inputs(rows: list[int]) -> np.ndarray:
    """Return rows as the network sees them, float [rows, 64]."""
    return ((IMAGES[rows].reshape(len(rows), -1) / 255 - MEAN) / STD).astype(np.float64)


@dataclass
class Seen:
    """What a curious server keeps."""

    transport: InProcessTransport
    replies: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    """Kind of the request and content of the reply, of the victim alone."""
    sums: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)
    """Sums over clients by field."""

    def keep(self, node: int, request: Any, reply: Any) -> Any:
        """Keep a reply of the victim, and hand it on."""
        if node == 0 and isinstance(reply, bytes):
            self.replies.append((request.kind, unpack(reply)))
        return reply

    def upload(self, field: str) -> dict[str, np.ndarray]:
        """Return the tensors of one field that the victim sent, or nothing."""
        for _, reply in self.replies:
            fields = reply.get("uploads", {}).get("0", {})
            if field in fields:
                value = fields[field]["value"]
                return {name: tensor.double().numpy() for name, tensor in value.items()}
        return {}


def federate(
    folder: Any, monkeypatch: Any, rows: dict[int, list[int]], policy: dict[str, Any],
    **sections: Any,
) -> Seen:  # fmt: skip
    """Run a federation whose nodes hold these rows of the digits, and return what was seen."""
    config = {**CONFIG, "clients": {"count": len(rows)}, **sections}
    data = {node: write(folder / f"data-{node}", chosen) for node, chosen in rows.items()}
    engine, transport = in_process_engine(config, folder, data)
    transport.policy = NodePolicy(**policy)
    seen = Seen(transport)
    transport.spoil = seen.keep
    watch_sums(seen, monkeypatch)
    run(config, engine=engine)
    return seen


def write(folder: Any, rows: list[int]) -> Any:
    """Write the file of a node's only task; all nodes are tested on the same rows."""
    folder.mkdir(parents=True)
    test = list(range(1700, 1750))
    np.savez(
        folder / "task-1.npz", x_train=IMAGES[rows], y_train=LABELS[rows], x_test=IMAGES[test],
        y_test=LABELS[test], class_names=np.array(CLASSES),
    )  # fmt: skip
    return folder


def watch_sums(seen: Seen, monkeypatch: Any) -> None:
    """Keep what the server opens at the end of every exchange."""
    from perdure.training.secure_collector import SecureUploadCollector

    def watched(close: Any) -> Any:
        def close_and_keep(self: UploadCollector) -> None:
            close(self)
            for name, values in self.collected.sums.items():
                seen.sums[name] = {key: total.double().numpy() for key, total in values.items()}

        return close_and_keep

    for kind in (UploadCollector, SecureUploadCollector):
        monkeypatch.setattr(kind, "close", watched(kind.close))


def cosines(found: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return the absolute cosines of found directions with rows, [found, rows]."""
    found, rows = np.atleast_2d(found), np.atleast_2d(rows)
    lengths = np.linalg.norm(found, axis=1)[:, None] * np.linalg.norm(rows, axis=1)
    return np.abs(found @ rows.T) / np.maximum(lengths, 1e-30)
