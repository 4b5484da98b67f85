"""The auto engine: chooses serial or vector by timing a few steps of the first round's clients."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from perdure.config import Config
from perdure.config.engine import EngineConfig
from perdure.config.section import PositiveInt
from perdure.contract.context import Client
from perdure.contract.uploads import FailedUpload, MaskedUpload, StackedUploads
from perdure.core.trees import Tree
from perdure.training.engines.engine import Engine, InProcessEngine
from perdure.training.engines.serial import SerialEngine, train_client
from perdure.training.engines.traced_steps import TracedSteps
from perdure.training.engines.vector import VectorEngine, chunk_size, train_stack
from perdure.training.local_training import LocalTraining, SaveClient

log = logging.getLogger(__name__)

_TRIAL_STEPS = 4
"""Local steps of a trial."""
_MAX_TIME_RATIO = 0.8
"""Another chunk is chosen only if its time is below this fraction of the default chunk's."""
_REPEATS = 5
"""Timed repetitions of each trial, of which the fastest counts, since timings are noisy."""


class AutoEngineConfig(EngineConfig):
    """Serial or vector, whichever a short trial finds faster.

    Example: `engine: {kind: auto}`
    """

    chunk: PositiveInt | None = None
    """Clients trained as one stack, if vector is chosen. Default: found by the trial."""

    chooses: ClassVar[bool] = True

    def make(self, config: Config) -> AutoEngine:
        """Return the engine."""
        return AutoEngine(self.chunk)


class AutoEngine(InProcessEngine):
    """Serial or vector, whichever trains the first round's clients faster."""

    def __init__(self, chunk: int | None = None) -> None:
        self.chunk = chunk
        self.chosen: Engine | None = None
        """The engine, once it is chosen."""

    @property
    def name(self) -> str:
        """The kind of the chosen engine; `auto` before it is chosen."""
        return self.chosen.name if self.chosen else "auto"

    def train(
        self, training: LocalTraining, clients: list[Client], save_client: SaveClient
    ) -> Iterator[StackedUploads | MaskedUpload | FailedUpload]:
        """Choose an engine in the first call, then train with it."""
        if self.chosen is None:
            self.chosen = self._choose(training, clients)
        yield from self.chosen.train(training, clients, save_client)

    def choice(self) -> Tree:
        """Return the chosen engine and its own choices, for a checkpoint."""
        if self.chosen is None:
            return {}
        return {"kind": self.chosen.name, **self.chosen.choice()}

    def restore(self, choice: Tree) -> None:
        """Use the engine that an earlier process chose, so that a resumed run repeats its bits."""
        if choice:
            vector = choice["kind"] == VectorEngine.name
            self.chosen = VectorEngine(choice["chunk"]) if vector else SerialEngine()
            self.chosen.restore(choice)

    def _choose(self, training: LocalTraining, clients: list[Client]) -> Engine:
        if len(clients) == 1:
            return SerialEngine()
        reason = training.context.network.body.vector_reason
        if reason is not None:
            log.warning("the clients cannot be stacked and are trained serially: %s", reason)
            return SerialEngine()
        steps = min(_TRIAL_STEPS, training.train_config.max_steps or _TRIAL_STEPS)
        trial = replace(
            training, train_config=training.train_config.model_copy(update={"max_steps": steps})
        )
        seconds = seconds_per_client(trial, clients, self._candidate_chunks(training, clients))
        serial, default = seconds.pop(0), self._default_chunk(training, clients)
        best = min(seconds, key=lambda size: seconds[size])
        chunk = best if seconds[best] < _MAX_TIME_RATIO * seconds[default] else default
        ratio = serial / seconds[chunk]
        log.info("calibration: vector with chunks of %d is %.2f times serial", chunk, ratio)
        return VectorEngine(chunk) if ratio > 1 else SerialEngine()

    def _candidate_chunks(self, training: LocalTraining, clients: list[Client]) -> list[int]:
        default = self._default_chunk(training, clients)
        if self.chunk:
            return [default]
        return sorted({max(2, default // 2), default, min(len(clients), default * 2)})

    def _default_chunk(self, training: LocalTraining, clients: list[Client]) -> int:
        return self.chunk or max(2, min(chunk_size(training, clients[0]), len(clients)))


@dataclass(frozen=True)
class TimedTrial:
    """A few local steps of some clients, to be timed."""

    run: Callable[[], object]
    """Takes the steps."""
    clients: int
    """Number of clients."""

    def seconds(self) -> float:
        """Return the seconds per client, or infinity if these clients cannot be stacked."""
        start = time.perf_counter()
        try:
            self.run()
        except (RuntimeError, NotImplementedError) as error:
            log.info("calibration: the clients cannot be stacked: %s", error)
            return float("inf")
        return (time.perf_counter() - start) / self.clients


def seconds_per_client(
    training: LocalTraining, clients: list[Client], chunks: list[int]
) -> dict[int, float]:
    """Return the seconds per client for each chunk size, and for the serial engine under key 0.

    Trials are interleaved, so that a slow moment of the machine affects all of them.
    """
    trials = {0: serial_trial(training, clients[:2])}
    trials |= {chunk: vector_trial(training, clients[:chunk]) for chunk in chunks}
    first = {size: trial.seconds() for size, trial in trials.items()}  # includes tracing
    possible = [size for size, seconds in first.items() if seconds < float("inf")]
    repeats = [{size: trials[size].seconds() for size in possible} for _ in range(_REPEATS)]
    return first | {size: min(repeat[size] for repeat in repeats) for size in possible}


def serial_trial(training: LocalTraining, clients: list[Client]) -> TimedTrial:
    """Return a trial that trains one client after another."""
    return TimedTrial(lambda: [train_client(training, client) for client in clients], len(clients))


def vector_trial(training: LocalTraining, clients: list[Client]) -> TimedTrial:
    """Return a trial that trains all clients as one stack."""
    steps = TracedSteps()
    return TimedTrial(lambda: train_stack(training, clients, steps), len(clients))
