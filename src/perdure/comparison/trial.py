"""Find the fastest engine and its chunk for a config, by timing a few steps of its run."""

from __future__ import annotations

from typing import Any, NoReturn

from perdure.config import AutoEngineConfig, Config
from perdure.engines.auto import AutoEngine
from perdure.engines.malloc import keep_freed_memory
from perdure.engines.vector import VectorEngine, chunk_size
from perdure.execution.runner import run

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
    engine = _Timing(section.chunk) if isinstance(section, AutoEngineConfig) else _Sizing()
    try:
        run(_short(config), engine=engine)
    except _Decided as decision:
        return {"kind": decision.kind, "chunk": decision.chunk}
    return {"kind": None, "chunk": None}


def _short(config: Config) -> Config:
    steps = min(_STEPS, config.train.max_steps or _STEPS)
    train = config.train.model_copy(update={"max_steps": steps})
    return config.model_copy(update={"train": train})
