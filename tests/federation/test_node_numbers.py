"""Numbers as targets where nodes hold the data: they send sums of errors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from in_process import in_process_engine
from sklearn.metrics import mean_absolute_error, r2_score

import perdure
from perdure.core.errors import UserError
from perdure.federation.messages import pack, unpack
from perdure.runs.run import run

CONFIG = {
    "stream": {"kind": "domains", "tasks": 2},
    "clients": {"count": 2},
    "model": {"kind": "mlp", "hidden": [8]},
    "train": {"rounds": 2, "lr": 0.05},
    "data": {
        "source": "npz", "path": "none.npz", "mean": [0.0], "std": [1.0], "target": "number",
        "target_mean": 100.0, "target_std": 20.0,
    },
    "engine": {"kind": "flower"},
    "federation": {"classes": ["dose"], "shape": [4]},
    "seed": 100,
}  # fmt: skip


@pytest.fixture
def data(tmp_path):
    folders, draw = {}, np.random.default_rng(100)
    weights = draw.normal(size=4)
    for node in range(2):
        folders[node] = tmp_path / f"data-{node}"
        folders[node].mkdir()
        for task in (1, 2):
            x = draw.normal(size=(60, 4)).astype(np.float32)
            y = 100 + 20 * task * x @ weights
            arrays = {"x_train": x[:40], "y_train": y[:40], "x_test": x[40:], "y_test": y[40:]}
            np.savez(folders[node] / f"task-{task}.npz", **arrays)
    return folders


def test_scores_are_those_of_all_nodes_together(tmp_path, data):
    engine, _ = in_process_engine(CONFIG, tmp_path, data)
    result = run(CONFIG, out=tmp_path / "run", engine=engine)
    model = perdure.load(tmp_path / "run")
    for task in range(2):
        parts = [np.load(data[node] / f"task-{task + 1}.npz") for node in range(2)]
        y = np.concatenate([part["y_test"] for part in parts])
        predicted = model.predict(np.concatenate([part["x_test"] for part in parts]))
        scores = {name: result.scores[name]["task_agnostic"][1][task] for name in ("r2", "mae")}
        assert scores["r2"] == pytest.approx(r2_score(y, predicted), rel=1e-5)
        assert scores["mae"] == pytest.approx(mean_absolute_error(y, predicted), rel=1e-5)
        assert result.matrix["task_agnostic"][1][task] == scores["r2"]
        assert list(result.values["client_scores"][task]) == ["0", "1"]


def test_impossible_errors_are_left_out(tmp_path, data):
    engine, transport = in_process_engine(CONFIG, tmp_path, data)

    def spoil(node, request, reply):
        if request.kind != "evaluate" or node == 0:
            return reply
        tree = unpack(reply)
        tree["counts"][0]["sums"]["task_aware"]["errors"] = torch.tensor(
            [20.0, 9, 1, 0, 1]
        ).double()
        return pack(tree)

    transport.spoil = spoil
    values = run(CONFIG, engine=engine).values
    assert list(values["client_scores"][0]) == ["0"]


@pytest.mark.parametrize("key", ["target_mean", "target_std"])
def test_the_scale_must_be_agreed_on(tmp_path, data, key):
    config = {**CONFIG, "data": {**CONFIG["data"], key: None}}
    with pytest.raises(UserError, match=rf"data\.{key}: must be a number in a federation"):
        run(config, engine=in_process_engine(config, tmp_path, data)[0])
