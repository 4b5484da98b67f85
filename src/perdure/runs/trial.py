"""Short trials of a config: does its method run on both engines, and which one is faster?"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from perdure.config import Config
from perdure.core.errors import UserError
from perdure.core.event_log import Event
from perdure.core.trees import Tensors
from perdure.runs.run import run
from perdure.training.engines.auto import AutoEngine
from perdure.training.engines.engine import Engine, keep_freed_memory
from perdure.training.engines.serial import SerialEngine
from perdure.training.engines.vector import VectorEngine, chunk_size
from perdure.training.experiment import build_experiment
from perdure.training.loop import run_stream
from perdure.training.state import RunState

# ---- Find the fastest engine and its chunk for a config, by timing a few steps of its run

_STEPS = 4
"""Local steps per client; the calibration of the auto engine needs no more."""


class _Decided(Exception):
    """Raised to end a run as soon as its engine is known."""

    def __init__(self, kind: str, chunk: int | None) -> None:
        super().__init__(kind, chunk)
        self.kind, self.chunk = kind, chunk


class _Timing(AutoEngine):
    """Calibrates, and ends the run."""

    def train(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Train the first clients, which calibrates, and raise the choice."""
        next(super().train(*args, **kwargs), None)
        raise _Decided(self.name, self.choice().get("chunk"))


class _Sizing(VectorEngine):
    """Computes the chunk of the vector engine, and ends the run."""

    def train(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise the chunk computed for the first client."""
        job, clients = args[:2]
        raise _Decided(self.name, chunk_size(job, clients[0]))


def find_engine(config: Config) -> dict[str, Any]:
    """Return `kind` and `chunk` for a config that leaves them open; None if no client trains."""
    keep_freed_memory()
    section = config.engine
    engine = _Timing(section.chunk_size) if section.chooses else _Sizing()
    try:
        run(_short(config), engine=engine)
    except _Decided as decision:
        return {"kind": decision.kind, "chunk": decision.chunk}
    return {"kind": None, "chunk": None}


def _short(config: Config) -> Config:
    steps = min(_STEPS, config.train.max_steps or _STEPS)
    train = config.train.model_copy(update={"max_steps": steps})
    return config.model_copy(update={"train": train})


# ---- A short trial of a config on both engines: does its method run, and do they agree?

AGREEMENT = 1e-4
"""Largest difference of a parameter that rounding explains after so few steps."""
_TASKS, _CLIENTS, _DRY_STEPS = 2, 4, 2


@dataclass(frozen=True)
class DryRun:
    """The outcome of a dry run."""

    tasks: int
    """Number of trained tasks."""
    difference: float
    """Largest difference of a parameter between the engines."""
    parameter: str
    """Name of the parameter with the largest difference."""
    stacked: bool
    """Whether the vector engine could stack the clients."""

    @property
    def agrees(self) -> bool:
        """Whether the engines differ by no more than rounding."""
        return self.difference <= AGREEMENT


class _EnoughTasks(Exception):
    """Ends the loop after the tasks of the dry run."""


def dry_run(config: Config, method_dir: Path | None = None) -> DryRun:
    """Train two tasks of one round of two local steps on both engines and compare the models.

    Raises:
        UserError: The config is invalid, or its data is on the nodes of a federation.

    """
    if config.federation is not None:
        raise UserError("--dry-run: must be a config without the section federation, got one")
    short = _shortened(config)
    vector = VectorEngine()
    serial, stacked = (_train(short, method_dir, e) for e in (SerialEngine(), vector))
    differences = _differences(serial.server.params, stacked.server.params)
    worst = max(differences, key=lambda name: differences[name])
    return DryRun(serial.task, differences[worst], worst, not vector.choice()["serial"])


def _shortened(config: Config) -> Config:
    train = {"rounds": 1, "max_steps": _DRY_STEPS}
    per_round = min(config.per_round, _CLIENTS)
    return config.model_copy(
        update={
            "train": config.train.model_copy(update=train),
            "clients": config.clients.model_copy(update={"per_round": per_round}),
        }
    )


def _train(config: Config, method_dir: Path | None, engine: Engine) -> RunState:
    experiment = build_experiment(config, method_dir=method_dir, engine=engine)
    state = experiment.initial_state()

    def after(state: RunState, event: Event) -> None:
        if state.task == _TASKS:
            raise _EnoughTasks

    try:
        return run_stream(experiment, state, after)
    except _EnoughTasks:
        return state


def _differences(a: Tensors, b: Tensors) -> dict[str, float]:
    return {name: float((value - b[name]).abs().max()) for name, value in a.items()}
