"""Nobody knows the future: three tasks are the first three of five, with every method."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from perdure.config import parse
from perdure.methods.registry import KINDS
from perdure.runs.result import model_hash
from perdure.training.experiment import build_experiment
from perdure.training.loop import run_stream
from perdure.training.state import RunState

PROMPTS = ("fed-l2p", "fed-dualp", "pip")
OPTIONS: dict[str, dict[str, Any]] = {
    "fedprotip": {"max_examples": 32, "max_columns": 32, "space_rank": 4},
    "gpm": {"max_examples": 32, "max_columns": 32},
    "fot": {"sketch_ratio": 1.0},
    "ewc": {"samples": 8},
    "er": {"budget": 10, "replay_batch": 4},
    "stamp": {"budget": 2},
    "fed-l2p": {"length": 1, "pool": 2, "top": 1},
    "fed-dualp": {"length": 1, "pool": 2, "expert_layers": [2]},
    "pip": {"length": 1, "pool": 2, "expert_layers": [2]},
}
COMMON: dict[str, Any] = {
    "data": {"limit": 150, "test_limit": 50},
    "clients": {"count": 3, "per_round": 2},
    "model": {"hidden": [8]},
    "train": {"rounds": 1, "max_steps": 2, "batch_size": 16},
    "engine": {"kind": "serial"},
}
VIT = {"kind": "vit", "init": "random", "width": 8, "heads": 2, "depth": 3, "patch": 4}


def three_tasks(values: dict[str, Any], tasks: int) -> RunState:
    """The state after the third task of a stream of `tasks` tasks."""
    stream = {**values["stream"], "tasks": tasks}
    experiment = build_experiment(parse({**COMMON, **values, "stream": stream}))
    states: list[RunState] = []

    class Stop(Exception):
        pass

    def after(state: RunState, event: dict[str, Any]) -> None:
        if event["event"] == "task" and event["task"] == 2:
            states.append(state)
            raise Stop

    with pytest.raises(Stop):
        run_stream(experiment, experiment.initial_state(), after)
    return states[0]


def method(kind: str) -> dict[str, Any]:
    return {"kind": kind, **OPTIONS.get(kind, {})}


def check_same(values: dict[str, Any]) -> None:
    three, five = three_tasks(values, 3), three_tasks(values, 5)
    hashes = [model_hash(state.server.params | state.server.buffers) for state in (three, five)]
    assert hashes[0] == hashes[1]
    for mode, rows in three.matrix.items():
        assert [row[:3] for row in rows] == [row[:3] for row in five.matrix[mode]]
    assert three.ledger.by_field == five.ledger.by_field


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in PROMPTS])
@pytest.mark.parametrize("presence", [1.0, 0.7])
def test_permuted(kind: str, presence: float) -> None:
    stream = {"kind": "permuted", "presence": presence}
    check_same({"method": method(kind), "stream": stream})


@pytest.mark.parametrize("kind", KINDS)
def test_split_with_a_growing_head(kind: str) -> None:
    body = VIT if kind in PROMPTS else {"hidden": [8]}
    stream = {"kind": "split", "classes_per_task": 2, "presence": 0.7}
    check_same({"method": method(kind), "stream": stream, "model": {**body, "head": "growing"}})


@pytest.fixture(scope="module")
def domains(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """Five small domains with the same classes."""
    folder, found = tmp_path_factory.mktemp("domains"), []
    for number in range(5):
        rng = np.random.default_rng(number)
        images = rng.integers(0, 256, (60, 8, 8), dtype=np.uint8)
        labels = np.arange(60) % 3
        path = Path(folder) / f"{number}.npz"
        arrays = {"x_train": images, "y_train": labels, "x_test": images, "y_test": labels}
        np.savez(path, **arrays)
        found.append({"source": "npz", "path": str(path)})
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_domains(kind: str, domains: list[dict[str, str]]) -> None:
    body = VIT if kind in PROMPTS else {"hidden": [8]}
    stream = {"kind": "domains", "domains": domains}
    check_same({"method": method(kind), "stream": stream, "model": body, "data": {}})
