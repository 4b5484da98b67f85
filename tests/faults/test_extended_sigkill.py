"""SIGKILL while a run is extended or rewound: nothing is lost, and the result has the same bits.

`make faults` kills ten times as often (PERDURE_KILLS).
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import perdure
from perdure.config import load_saved

KILLS = int(os.environ.get("PERDURE_KILLS", "6"))
"""Kills over all phases together."""

if not hasattr(signal, "SIGKILL"):
    pytest.skip("this platform has no SIGKILL", allow_module_level=True)

processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["perdure", "sklearn.datasets"])

CONFIG: dict[str, Any] = {
    "data": {"limit": 200},
    "stream": {"kind": "split", "tasks": 2, "classes_per_task": 2},
    "clients": {"count": 4, "per_round": 3},
    "model": {"hidden": [16], "head": "shared"},
    "method": {"kind": "er", "budget": 20, "with": [{"kind": "fot"}]},
    "train": {"rounds": 4, "batch_size": 16, "momentum": 0.5},
    "engine": {"kind": "serial"},
}
PHASES: list[dict[str, Any]] = [
    {"tasks": 1},
    {"data": "new.npz", "settings": {"train.lr": 0.05}},
    {"rewind": 3},
    {"data": "other.npz"},
]
"""What is done one after the other: extensions, and going back to a task."""


def apply(run: Path, phase: dict[str, Any]) -> None:
    if "rewind" in phase:
        perdure.rewind(run, phase["rewind"])
    elif "data" in phase:
        data = run.parent / phase["data"]
        perdure.extend(run, data=data, settings=phase.get("settings"))
    else:
        perdure.extend(run, tasks=phase["tasks"])


def recover(run: Path, phase: dict[str, Any], before: str) -> None:
    """Do what a person does next: resume what was begun, or ask for it again."""
    begun = (run / "config.yaml").read_text() != before
    if begun and "rewind" not in phase:
        perdure.resume(run)
    else:
        apply(run, phase)


def outcome(run: Path) -> dict[str, Any]:
    result = json.loads((run / "result.json").read_text())
    events = (run / "events.jsonl").read_text().splitlines()
    card = json.loads((run / "model/card.json").read_text())
    kept = {key: value for key, value in result.items() if key not in ("seconds", "peak_rss_mb")}
    return {**kept, "events": events, "card": card["sha256"]}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, float, Any]]:
    """For each phase a copy of the run before it, its seconds, and the outcome after it."""
    folder = tmp_path_factory.mktemp("undisturbed")
    for seed, name in enumerate(("new.npz", "other.npz")):
        rng, labels = np.random.default_rng(seed), np.array(["a", "b", "c"])[np.arange(60) % 3]
        x = rng.integers(0, 17, (60, 8, 8), dtype=np.uint8)
        np.savez(folder / name, x_train=x, y_train=labels, x_test=x, y_test=labels)
    run, found = folder / "run", []
    perdure.run(CONFIG, out=run)
    for number, phase in enumerate(PHASES):
        copy = folder / f"before {number}"
        shutil.copytree(run, copy)
        start = time.perf_counter()
        apply(run, phase)
        found.append((copy, time.perf_counter() - start, outcome(run)))
    return found


@pytest.mark.parametrize("kill", range(KILLS))
def test_a_kill_loses_nothing(kill: int, undisturbed: Any, tmp_path: Path) -> None:
    phase = PHASES[kill % len(PHASES)]
    copy, seconds, expected = undisturbed[kill % len(PHASES)]
    run = copy.parent / f"killed {kill}"
    shutil.copytree(copy, run)
    before = (run / "config.yaml").read_text()
    process = processes.Process(target=apply, args=(run, phase))
    process.start()
    time.sleep(random.Random(kill).uniform(0, 1.2 * seconds))
    process.kill()
    process.join()
    perdure.load(run)  # there is always a model
    recover(run, phase, before)
    assert outcome(run) == expected


def test_a_rewind_that_was_killed_can_be_extended_at_once(undisturbed: Any, tmp_path: Path) -> None:
    """The config is cut first; what came after must not be resumed from."""
    copy, _, _ = undisturbed[2]
    run = copy.parent / "half rewound"
    shutil.copytree(copy, run)
    process = processes.Process(target=apply, args=(run, PHASES[2]))
    process.start()
    while load_saved(run / "config.yaml").task_total > 3 and process.is_alive():
        time.sleep(0.0005)
    process.kill()
    process.join()
    apply(run, PHASES[3])
    expected = undisturbed[3][2]
    assert outcome(run)["model_sha256"] == expected["model_sha256"]
    assert outcome(run)["matrix"] == expected["matrix"]
