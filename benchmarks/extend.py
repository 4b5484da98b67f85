"""Seconds of `perdure.extend` with one task, relative to the seconds that the task itself takes.

    python -m benchmarks extend --out extend.json

The rest is what an extension costs: reading the run, its data and its last checkpoint, and writing
result, model and report. The task takes at least a minute.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import perdure

BOUND = 1.05
CONFIG: dict[str, Any] = {
    "stream": {"tasks": 1},
    "clients": {"count": 20},
    "model": {"hidden": [400, 400]},
    "train": {"rounds": 400, "local_epochs": 4, "batch_size": 16},
    "runs": {"checkpoint_every": 50},
}


def main(repeats: int = 5) -> dict[str, Any]:
    """Return the ratio of each repetition, and their median."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        first = {**CONFIG["train"], "rounds": 2}
        perdure.run({**CONFIG, "train": first}, out=run)
        turns = [_extended(run) for _ in range(repeats)]
    median = statistics.median(turn["ratio"] for turn in turns)
    return {
        "benchmark": "extend",
        "statistic": f"median of {repeats} extensions",
        "turns": turns,
        "median_ratio": round(median, 4),
        "bound": BOUND,
        "met": median <= BOUND,
    }


def _extended(run: Path) -> dict[str, float]:
    start = time.perf_counter()
    rounds = {"train.rounds": CONFIG["train"]["rounds"]}
    result = perdure.extend(run, tasks=1, settings=rounds)
    seconds = time.perf_counter() - start
    task = result.values["seconds"]["by_task"][-1]
    return {
        "seconds": round(seconds, 3), "task_seconds": task, "ratio": round(seconds / task, 4),
    }  # fmt: skip
