"""Measure what clipping and noise leave of FOT and STAMP, on permuted digits.

    python -m tools.measure_clip [CASE ...] [--table]

Writes docs/measured/clip.json and prints the table in docs/privacy.md. With cases, only these are
measured, and others that the same code measured before are kept; `--table` measures nothing.
"""

from __future__ import annotations

import argparse
import json
import logging
from statistics import mean
from typing import Any

import torch

import perdure
from tools.results import MEASURED, kept_results, write_results

FILE = MEASURED / "clip.json"
SEEDS = (0, 1, 2)
BASE: dict[str, Any] = {
    "data": {"source": "digits"},
    "stream": {"kind": "permuted", "tasks": 5},
    "clients": {"count": 10, "partition": {"kind": "dirichlet", "alpha": 0.5}},
    "model": {"kind": "mlp", "hidden": [100]},
    "train": {"rounds": 10, "local_epochs": 1, "batch_size": 16, "lr": 0.1},
    "engine": {"kind": "vector", "chunk": 10},
}
FEDAVG, FOT, STAMP = ({"kind": kind} for kind in ("fedavg", "fot", "stamp"))
CLIP = {"clip": 1.0}
LOCAL = {**CLIP, "mode": "local"}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fedavg": (FEDAVG, {}),
    "fot": (FOT, {}),
    "fot, privacy.clip 1": (FOT, CLIP),
    "fot, privacy.clip 1, noise 0.01": (FOT, {**CLIP, "noise": 0.01}),
    "fot, privacy.clip 1, noise 0.1": (FOT, {**CLIP, "noise": 0.1}),
    "fot, sketch_noise standard": ({**FOT, "sketch_noise": "standard"}, {}),
    "fot, sketch_noise paper": ({**FOT, "sketch_noise": "paper"}, {}),
    "fot, sketch_noise standard, epsilon 50": (
        {**FOT, "sketch_noise": "standard", "epsilon": 50.0},
        {},
    ),
    "stamp": (STAMP, {}),
    "stamp, privacy.clip 1, local": (STAMP, LOCAL),
    "stamp, privacy.clip 1, local, noise 0.01": (STAMP, {**LOCAL, "noise": 0.01}),
}
"""By name, the method and the `privacy` section."""


def measure(method: dict[str, Any], privacy: dict[str, Any], seed: int) -> dict[str, Any]:
    """Return ACC, the protected fraction of each layer after the last task, and the warnings."""
    tasks: list[dict[str, Any]] = []

    def keep(state: Any, event: dict[str, Any]) -> None:
        if event["event"] == "task":
            tasks.append(event)

    config = {**BASE, "method": method, "privacy": privacy, "seed": seed}
    result = perdure.run(config, watch=keep)
    found = {
        "acc": result.metrics["task_agnostic"]["ACC"],
        "used": tasks[-1].get("method", {}).get("used"),
        "warnings": [warning["text"] for warning in result.values["warnings"]],
    }
    return found


def table(runs: dict[str, list[dict[str, Any]]]) -> str:
    """Return the Markdown table: mean accuracy in percent, with the range over the seeds."""
    lines = ["| method | ACC |", "|---|---|"]
    for name in CASES:
        accs = [100 * run["acc"] for run in runs.get(name, ())]
        if accs:
            lines.append(f"| {name} | {mean(accs):.1f} ({min(accs):.1f} to {max(accs):.1f}) |")
    return "\n".join(lines)


def main() -> None:
    """Measure the named cases, or all, write them, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE")
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    for name, (method, privacy) in CASES.items() if not given.table else ():
        if given.cases and name not in given.cases:
            continue
        found = [measure(method, privacy, seed) for seed in SEEDS]
        write_results(FILE, {"runs": kept_results(FILE).get("runs", {}) | {name: found}})
    print(table(json.loads(FILE.read_text(encoding="utf-8"))["runs"]))


if __name__ == "__main__":
    main()
