"""SIGKILL while a run is extended or rewound: nothing is lost, and the result has the same bits.

`make faults` kills more often (PERDURE_KILLS).
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from killed_runs import stored

import perdure
from perdure.config import load_saved

pytestmark = pytest.mark.slow

KILLS = 3 * int(os.environ.get("PERDURE_KILLS", "0")) // 2 or 2
"""Kills per phase."""

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
    return {
        **kept, "events": events, "card": card["sha256"],
        "clients": sorted(os.listdir(run / "clients")),
        "checkpoints": stored(run / "checkpoints"), "of tasks": stored(run / "checkpoints/tasks"),
    }  # fmt: skip


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


@pytest.mark.parametrize("number", range(len(PHASES)), ids=lambda number: " ".join(PHASES[number]))
def test_kills_lose_nothing(
    number: int, undisturbed: Any, record_property: Callable[..., None]
) -> None:
    phase, counts = PHASES[number], {"kills": 0, "runs": 0, "differences": 0}
    for kill in range(KILLS):
        copy, seconds, expected = undisturbed[number]
        run = copy.parent / f"killed {number} {kill}"
        shutil.copytree(copy, run)
        before = (run / "config.yaml").read_text()
        after = random.Random(f"{number} {kill}").uniform(0, 1.2 * seconds)
        counts["kills"] += kill_after(run, phase, after)
        perdure.load(run)  # there is always a model
        recover(run, phase, before)
        counts["runs"] += 1
        counts["differences"] += outcome(run) != expected
    name = f"phase {number + 1}: {', '.join(phase)}"
    record_property("faults", {"section": "extensions", "name": name, "engine": "serial", **counts})
    assert counts["differences"] == 0


def kill_after(run: Path, phase: dict[str, Any], seconds: float) -> bool:
    """Kill a phase after some seconds, and return whether it had not ended."""
    process = processes.Process(target=apply, args=(run, phase))
    process.start()
    time.sleep(seconds)
    process.kill()
    process.join()
    return process.exitcode != 0


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
