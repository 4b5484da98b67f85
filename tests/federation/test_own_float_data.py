"""Nodes with local data of numbers: features and time series are trained as in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from in_process import in_process_engine
from test_own_data import joined_stream

from perdure.config import parse
from perdure.deploy.model_files import load_model
from perdure.federation.messages import BadMessage
from perdure.federation.node.data import local_stream
from perdure.runs.result import model_hash
from perdure.runs.run import run
from perdure.training.engines.serial import SerialEngine
from perdure.training.experiment import build_experiment
from perdure.training.loop import run_stream

NAMES = ["clear", "cloudy", "rain", "snow"]


def config(shape: tuple[int, ...]) -> dict[str, Any]:
    return {
        "stream": {"kind": "split", "tasks": 2},
        "clients": {"count": 2},
        "model": {"kind": "mlp", "hidden": [16]},
        "train": {"rounds": 4, "batch_size": 16, "local_epochs": 2},
        "data": {"mean": [1.5], "std": [1.5]},
        "engine": {"kind": "flower"},
        "federation": {"classes": NAMES, "shape": list(shape), "tasks": [NAMES[:2], NAMES[2:]]},
        "device": "cpu",
    }


def rows(seed: int, labels: list[int], shape: tuple[int, ...]) -> tuple[Any, Any]:
    """Return numbers near the label, channels last, and names of classes."""
    y = np.repeat(labels, 20)
    layout = (*shape[1:], shape[0]) if len(shape) == 3 else shape
    noise = np.random.default_rng(seed).normal(scale=0.2, size=(len(y), *layout))
    return noise + y.reshape(-1, *[1] * len(layout)), np.array(NAMES)[y]


def write(folder: Path, shape: tuple[int, ...]) -> dict[int, Path]:
    """Write the data of two nodes and tasks; return the folder of each node."""
    folders = {node: folder / f"data-{node}" for node in range(2)}
    for node, place in folders.items():
        place.mkdir()
        for task, labels in enumerate(([0, 1], [2, 3])):
            x, y = rows(10 * node + task, labels, shape)
            np.savez(
                place / f"task-{task + 1}.npz", x_train=x, y_train=y, x_test=x[::4], y_test=y[::4],
                class_names=np.array(NAMES),
            )  # fmt: skip
    return folders


@pytest.mark.parametrize("shape", [(2, 6), (7,)])
def test_nodes_learn_numbers_as_one_process_does(tmp_path: Path, shape: tuple[int, ...]) -> None:
    folders = write(tmp_path, shape)
    engine, _ = in_process_engine(config(shape), tmp_path, folders)
    result = run(config(shape), out=tmp_path / "run", engine=engine)
    parsed = parse(config(shape))
    stream = joined_stream(parsed, [local_stream(parsed, folders[node], node) for node in folders])
    experiment = build_experiment(parsed, engine=SerialEngine(), stream=stream)
    state = run_stream(experiment, experiment.initial_state(), lambda state, event: None)
    assert model_hash(state.server.params | state.server.buffers) == result.values["model_sha256"]
    aware = result.matrix["task_aware"]
    assert aware is not None
    assert (aware[0][0] or 0) > 0.9
    model = load_model(tmp_path / "run")
    assert model.class_names == tuple(NAMES)
    assert model.predict(rows(99, [2, 3], shape)[0]).shape == (40,)


def test_images_of_floats_are_refused_by_the_node(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shape = (5, 4, 4)
    folders, parsed = write(tmp_path, shape), parse(config(shape))
    stream = local_stream(parsed, folders[0], 0)
    with pytest.raises(BadMessage, match="its data of task 1 cannot be used"):
        assert stream.tasks[0]
    assert "task-1: values: must be uint8 for images in a federation" in caplog.text
