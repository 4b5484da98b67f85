"""A run that is extended while its model is served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import perdure
from perdure.core.errors import UserError

pytest.importorskip("fastapi")
from perdure.deploy.live_model import LiveModel

CONFIG: dict[str, Any] = {
    "data": {"limit": 150, "test_limit": 50},
    "stream": {"kind": "split", "tasks": 2, "classes_per_task": 2},
    "clients": {"count": 2},
    "model": {"hidden": [8]},
    "train": {"rounds": 1, "max_steps": 2},
    "engine": {"kind": "serial"},
    "runs": {"report": False},
}


def test_a_new_task_is_taken_up_without_a_restart(tmp_path: Path) -> None:
    perdure.run(CONFIG, out=tmp_path / "run")
    live = LiveModel(tmp_path / "run", seconds=0)
    assert live.newest().last_task == 1
    rng = np.random.default_rng(0)
    x = rng.integers(0, 17, (40, 8, 8), dtype=np.uint8)
    names = np.array(["new", "other"])[np.arange(40) % 2]
    perdure.extend(tmp_path / "run", data=(x, names))
    assert live.newest().last_task == 2
    assert live.newest().class_names[-2:] == ("new", "other")
    assert live.card["tasks_seen"] == 3


def test_a_model_of_numbers_is_refused(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 3)).astype(np.float32)
    values = {**CONFIG, "data": {"target": "number"}, "stream": {"kind": "permuted", "tasks": 1}}
    perdure.run(values, out=tmp_path / "run", data=(x, x.sum(1)))
    with pytest.raises(UserError, match="must be a run that predicts classes"):
        LiveModel(tmp_path / "run")
