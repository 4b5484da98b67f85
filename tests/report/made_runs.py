"""Run directories that no training made: quick, and with numbers that a test can work out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from perdure.config import dump_saved, parse
from perdure.evaluation.forgetting import forgetting_by_task, metrics
from perdure.report.records import Runs
from perdure.runs.records import read_runs

TASKS = 3
LAYERS = ("fc1.weight", "fc2.weight")
Matrix = list[list[float | None]]


def matrix(seed: int, best: float, tasks: int = TASKS) -> Matrix:
    """Accuracies below `best`, drawn from a seed."""
    drawn = np.random.default_rng(seed).uniform(best - 0.3, best, (tasks, tasks)).round(4)
    return [
        [float(drawn[i, j]) if j <= i else None for j in range(tasks)] for i in range(tasks)
    ]  # fmt: skip


def make_run(
    path: Path,
    kind: str = "fedavg",
    seed: int = 0,
    best: float = 0.9,
    config: dict[str, Any] | None = None,
    tasks: int = TASKS,
    **result: Any,
) -> Path:
    """A finished run; fedprotip routes, fot and fedprotip have spaces, stamp sees conflicts."""
    checked = parse({"seed": seed, "method": {"kind": kind}, **(config or {})})
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(dump_saved(checked), encoding="utf-8")
    agnostic, aware = matrix(seed, best, tasks), matrix(seed + 100, best, tasks)
    routed = matrix(seed + 200, best, tasks) if kind == "fedprotip" else None
    by_mode = {"task_agnostic": agnostic, "task_aware": aware, "routed": routed}
    types = {"update": "Each"} if kind == "stamp" else {"update": "Sum"}
    values = {
        "method": kind,
        "seed": seed,
        "tasks": tasks,
        "matrix": by_mode,
        "metrics": {mode: metrics(table) if table else None for mode, table in by_mode.items()},
        "forgetting": {m: forgetting_by_task(t) if t else None for m, t in by_mode.items()},
        "routing": routed,
        "confusion": confusion(tasks) if routed else None,
        "bytes": {
            "up": 2_000_000 * tasks,
            "down": 1_000_000 * tasks,
            "by_task": [bytes_of_task()] * tasks,
            "by_field": {"up/update": 2_000_000 * tasks, "down/params": 1_000_000 * tasks},
            "types": types,
            "per_client": per_client(tasks),
            "kept": {"mean": 500, "max": 900, "by_task": [{"mean": 500, "max": 900}] * tasks},
        },
        "measure": "accuracy",
        "draws": "those of a seed",
        "seconds": {"total": 2.0 * tasks, "by_task": [2.0] * tasks},
        "peak_rss_mb": 300.0,
        "model_sha256": "0" * 64,
        **result,
    }
    (path / "result.json").write_text(json.dumps(values), encoding="utf-8")
    lines = "".join(json.dumps(event) + "\n" for event in events(kind, tasks))
    (path / "events.jsonl").write_text(lines, encoding="utf-8")
    return path


def bytes_of_task() -> dict[str, Any]:
    """What ten clients send and receive in one task."""
    fields = {"up/update": 2_000_000, "down/params": 1_000_000}
    return {"up": 2_000_000, "down": 1_000_000, "by_field": fields, "per_client": per_client(1)}


def per_client(tasks: int) -> dict[str, Any]:
    """Mean and maximum over the ten clients."""
    up, down = ({"mean": n * tasks, "max": 2 * n * tasks} for n in (200_000, 100_000))
    return {"clients": 10, "up": up, "down": down}


def confusion(tasks: int) -> list[list[float]]:
    """Right four times in five, else spread evenly."""
    wrong = 0.2 / (tasks - 1)
    return [[0.8 if i == j else wrong for j in range(tasks)] for i in range(tasks)]


def events(kind: str, tasks: int) -> list[dict[str, Any]]:
    """Two rounds per task and its end, with what the method would record."""
    made: list[dict[str, Any]] = []
    for task in range(tasks):
        seen = {"clients": {"cosine": 0.1 * task, "conflicts": 0.4}, "tasks": {"cosine": -0.1}}
        about = {"method": seen} if kind == "stamp" else {}
        made += [{"event": "round", "task": task, "round": r, **about} for r in range(2)]
        used = {"used": {layer: 0.2 * (task + 1) for layer in LAYERS}}
        ends = {"method": used} if kind in ("fot", "fedprotip") else {}
        made.append({"event": "task", "task": task, **ends})
    return made


def several(folder: Path) -> Runs:
    """Four methods with two seeds each: everything that the report can show."""
    kinds = ("fedavg", "fot", "fedprotip", "stamp")
    for kind in kinds:
        for seed in (0, 1):
            make_run(folder / kind / f"seed-{seed}", kind, seed)
    return read_runs([folder / kind for kind in kinds])
