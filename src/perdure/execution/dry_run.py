"""A short trial of a config on both engines: does its method run, and do they agree?"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perdure.config import Config
from perdure.core.errors import UserError
from perdure.core.trees import Tensors
from perdure.engines.serial import SerialEngine
from perdure.engines.vector import VectorEngine
from perdure.training.experiment import build_experiment
from perdure.training.loop import run_stream
from perdure.training.state import RunState

AGREEMENT = 1e-4
"""The largest difference of a weight that rounding explains after so few steps."""
_TASKS, _CLIENTS, _STEPS = 2, 4, 2


@dataclass(frozen=True)
class DryRun:
    """What came out of it."""

    tasks: int
    difference: float
    """The largest difference of a weight between the engines."""
    parameter: str
    """Where it is."""
    stacked: bool
    """Whether the vector engine could stack the clients."""

    @property
    def agrees(self) -> bool:
        """Whether the engines differ by no more than rounding."""
        return self.difference <= AGREEMENT


class _Enough(Exception):
    """The tasks of the trial are done."""


def dry_run(config: Config, method_dir: Path | None = None) -> DryRun:
    """Train two tasks of one round of two local steps on both engines and compare the models.

    Args:
        config: The experiment; its rounds, steps and clients per round are cut down.
        method_dir: Where a custom method is looked for.
    """
    if config.federation is not None:
        raise UserError("--dry-run: got a config with a federation section, whose data is on nodes")
    short = _shortened(config)
    vector = VectorEngine()
    serial, stacked = (_trained(short, method_dir, e) for e in (SerialEngine(), vector))
    gaps = _gaps(serial.server.params, stacked.server.params)
    worst = max(gaps, key=lambda name: gaps[name])
    return DryRun(serial.task, gaps[worst], worst, not vector.choice()["serial"])


def _shortened(config: Config) -> Config:
    train = {"rounds": 1, "first_task_rounds": None, "max_steps": _STEPS}
    per_round = min(config.per_round, _CLIENTS)
    return config.model_copy(
        update={
            "train": config.train.model_copy(update=train),
            "clients": config.clients.model_copy(update={"per_round": per_round}),
        }
    )


def _trained(config: Config, method_dir: Path | None, engine: Any) -> RunState:
    experiment = build_experiment(config, method_dir=method_dir, engine=engine)
    state = experiment.initial_state()

    def after(state: RunState, event: dict[str, Any]) -> None:
        if state.task == _TASKS:
            raise _Enough

    try:
        return run_stream(experiment, state, after)
    except _Enough:
        return state


def _gaps(one: Tensors, other: Tensors) -> dict[str, float]:
    return {name: float((value - other[name]).abs().max()) for name, value in one.items()}
