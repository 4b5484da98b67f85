"""Nodes that read local folders, from the command line to the result."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.datasets import load_digits

from conftest import Federation, flower_processes, wait_for

CLASSES = [str(digit) for digit in range(10)]
CONFIG = {
    "stream": {"kind": "domains", "tasks": 1},
    "clients": {"count": 3},
    "model": {"kind": "mlp", "hidden": [32]},
    "train": {"rounds": 2, "batch_size": 16, "local_epochs": 5},
    "data": {"mean": [0.3], "std": [0.38]},
    "federation": {"classes": CLASSES, "shape": [1, 8, 8]},
    "device": "cpu",
}


@pytest.fixture
def with_data(tmp_path):
    bundled = load_digits()
    x = np.rint(bundled.images * (255 / 16)).astype(np.uint8)
    for node in range(3):
        folder = tmp_path / "data" / f"node-{node}"
        folder.mkdir(parents=True)
        train, test = slice(node, 1200, 3), slice(1200 + node, None, 3)
        np.savez(
            folder / "task-1.npz",
            x_train=x[train], y_train=bundled.target[train],
            x_test=x[test], y_test=bundled.target[test],
        )  # fmt: skip
    federation = Federation(tmp_path / "home", tmp_path / "data")
    yield federation
    federation.stop()
    wait_for(lambda: flower_processes(federation.home) == [], "the end of all processes")


def test_three_nodes_train_on_local_folders(with_data):
    with_data.start()
    values = with_data.run(CONFIG, "own")
    assert values["failures"] == []
    assert values["client_updates"] == 6
    accuracy = values["matrix"]["task_agnostic"][0][0]
    assert accuracy > 0.7
    assert accuracy * 597 == pytest.approx(round(accuracy * 597))  # 597 test rows at three nodes
