"""Four tasks of digits at the nodes of a federation, in files that the nodes read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

CLASSES = [str(digit) for digit in range(10)]
TASKS = [["0", "1"], ["2", "3"], ["4", "5"], ["6", "7"]]
CONFIG = {
    "stream": {"kind": "split", "tasks": 4},
    "clients": {"count": 3},
    "model": {"kind": "mlp", "hidden": [8]},
    "train": {"rounds": 2, "batch_size": 16, "max_steps": 2},
    "data": {"mean": [0.3], "std": [0.38]},
    "engine": {"kind": "flower"},
    "federation": {"classes": CLASSES, "shape": [1, 8, 8], "tasks": TASKS},
    "runs": {"report": False},
    "device": "cpu",
}


def with_federation(config: dict, **keys) -> dict:
    """Return the config with other keys of its federation section."""
    return {**config, "federation": {**config["federation"], **keys}}


def write_tasks(folder: Path, node: int, nodes: int = 3) -> None:
    """Write the files of a node, with 20 rows per task for training and 10 for testing."""
    bundled = load_digits()
    images = np.rint(bundled.images * (255 / 16)).astype(np.uint8)
    folder.mkdir(parents=True)
    for number, digits in enumerate(TASKS):
        rows = np.flatnonzero(np.isin(bundled.target, [int(digit) for digit in digits]))
        train, test = np.split(rows[node::nodes][:30], [20])
        np.savez(
            folder / f"task-{number + 1}.npz",
            x_train=images[train], y_train=bundled.target[train], x_test=images[test],
            y_test=bundled.target[test], class_names=np.array(CLASSES),
        )  # fmt: skip


def write_nodes(folder: Path, nodes: int = 3) -> dict[int, Path]:
    """Write the files of all nodes, and return their folders."""
    folders = {node: folder / f"node-{node}" for node in range(nodes)}
    for node, path in folders.items():
        write_tasks(path, node, nodes)
    return folders
