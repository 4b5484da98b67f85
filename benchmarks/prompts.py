"""Seconds per round of PIP relative to Fed-DualP, and of Fed-DualP with cached queries.

    python -m benchmarks prompts --out prompts.json

The model is the bundled vision transformer. Rounds are taken in turns from runs
in their first task, from its second round on, when prototypes are injected; the result is the
median of the ratios within a turn. A whole task costs PIP less than its rounds in the middle do,
since prototypes are not computed after the last one. So a task is timed too, with as many rounds as
in the recipe pip-mnist; it has no bound.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.turns import median_ratio, timed_turns
from perdure.config import parse
from perdure.training.experiment import Experiment, build_experiment
from perdure.training.loop import begin_task
from perdure.training.round import train_round
from perdure.training.state import RunState

BOUNDS = {"pip over fed-dualp": 1.15, "fed-dualp over itself without kept queries": 0.6}
METHODS: dict[str, dict[str, Any]] = {
    "fed-dualp": {"kind": "fed-dualp"},
    "without": {"kind": "fed-dualp", "cache": False},
    "pip": {"kind": "pip"},
}
WARM_UP = 2  # rounds in which queries are computed and kept
TASK = 4  # rounds


def experiment(method: dict[str, Any], rounds: int) -> Experiment:
    """Return a run of ten clients with digits and tasks of so many rounds."""
    values = {
        "data": {"limit": 1000, "size": 28},
        "stream": {"kind": "split", "tasks": 2},
        "clients": {"count": 10, "partition": {"kind": "classes", "disjoint": True}},
        "model": {"kind": "vit"},
        "method": method,
        "train": {
            "rounds": rounds, "local_epochs": 2, "batch_size": 16, "lr": 0.002, "optimizer": "adam",
        },
        "engine": {"kind": "serial"},
    }  # fmt: skip
    return build_experiment(parse(values))


def standing(run: Experiment) -> RunState:
    """Return a run's state at the start of its first task, with all queries computed if kept."""
    state = run.initial_state()
    begin_task(run, state)
    train = run.task(0).train
    train.gather_cached(torch.from_numpy(np.arange(len(train))))
    return state


def train_task(run: Experiment, states: Iterator[RunState]) -> None:
    """Train all rounds of the first task, from the next state on."""
    state = next(states)
    for _ in range(TASK):
        train_round(run, state)


def task_ratio(repeats: int) -> float:
    """Return the ratio of PIP over Fed-DualP for a whole task."""
    contenders = {}
    for name in "pip", "fed-dualp":
        run = experiment(METHODS[name], TASK)
        states = [standing(run) for _ in range(repeats + 1)]
        contenders[name] = partial(train_task, run, iter(states))
    seconds = timed_turns(contenders, repeats, warm_up=1)
    return median_ratio(seconds["pip"], seconds["fed-dualp"])


def main(repeats: int = 20) -> dict[str, Any]:
    """Return both ratios, and that of a task."""
    runs = {n: experiment(method, repeats + WARM_UP + 1) for n, method in METHODS.items()}
    rounds = {name: partial(train_round, run, standing(run)) for name, run in runs.items()}
    seconds = timed_turns(rounds, repeats, WARM_UP)
    found = (
        median_ratio(seconds["pip"], seconds["fed-dualp"]),
        median_ratio(seconds["fed-dualp"], seconds["without"]),
    )
    ratios = {name: round(ratio, 3) for name, ratio in zip(BOUNDS, found, strict=True)}
    return {
        "benchmark": "prompts",
        "statistic": f"median over {repeats} turns of the ratio within a turn",
        "median_seconds_per_round": {
            name: round(statistics.median(values), 4) for name, values in seconds.items()
        },
        "ratios": ratios,
        "bounds": BOUNDS,
        "pip over fed-dualp, a task": {
            "rounds": TASK,
            "ratio": round(task_ratio(-(-repeats // 2)), 3),
        },
        "met": {name: ratios[name] <= bound for name, bound in BOUNDS.items()},
    }
