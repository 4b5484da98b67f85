"""Picks the engine by a short calibration on the run's own first clients, and keeps its choice."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from perdure.config import Config
from perdure.contract.context import Client
from perdure.contract.engine import Engine
from perdure.contract.local_training import LocalTraining, SaveClient
from perdure.contract.upload_collector import FailedUpload, MaskedUpload, StackedUploads
from perdure.core.trees import Tree
from perdure.engines.in_process import InProcessEngine
from perdure.engines.serial import SerialEngine, train_client
from perdure.engines.stack import train_stack
from perdure.engines.traced_steps import TracedSteps
from perdure.engines.vector import VectorEngine, chunk_size

log = logging.getLogger(__name__)

_STEPS = 4
"""Local steps of a trial."""
_BETTER = 0.8
"""Another chunk than the usual one must be faster than this share of its time to be chosen."""
_TRIALS = 5
"""The best of so many trials counts: machines are noisy."""


class AutoEngine(InProcessEngine):
    """Serial or vector, whichever trains the first round's clients faster."""

    def __init__(self, chunk: int | None = None) -> None:
        self.chunk = chunk
        self.chosen: Engine | None = None

    @classmethod
    def from_config(cls, config: Config) -> AutoEngine:
        """Return the engine of a config."""
        return cls(config.engine.chunk)

    @property
    def name(self) -> str:
        """The engine that was chosen."""
        return self.chosen.name if self.chosen else "auto"

    def train(
        self, training: LocalTraining, clients: list[Client], save_client: SaveClient
    ) -> Iterator[StackedUploads | MaskedUpload | FailedUpload]:
        """Calibrate once, then train with the engine that was chosen."""
        if self.chosen is None:
            self.chosen = self._choose(training, clients)
        yield from self.chosen.train(training, clients, save_client)

    def choice(self) -> Tree:
        """What a checkpoint keeps of the choice."""
        if self.chosen is None:
            return {}
        return {"kind": self.chosen.name, **self.chosen.choice()}

    def restore(self, choice: Tree) -> None:
        """Take up the choice of an earlier process, so that a resumed run goes on alike."""
        if choice:
            vector = choice["kind"] == "vector"
            self.chosen = VectorEngine(choice["chunk"]) if vector else SerialEngine()
            self.chosen.restore(choice)

    def _choose(self, training: LocalTraining, clients: list[Client]) -> Engine:
        if len(clients) == 1:
            return SerialEngine()
        steps = min(_STEPS, training.config.max_steps or _STEPS)
        trial = replace(training, config=training.config.model_copy(update={"max_steps": steps}))
        seconds = seconds_per_client(trial, clients, self._chunks(training, clients))
        serial, usual = seconds.pop(0), self._usual(training, clients)
        best = min(seconds, key=lambda size: seconds[size])
        chunk = best if seconds[best] < _BETTER * seconds[usual] else usual
        ratio = serial / seconds[chunk]
        log.info("calibration: vector with chunks of %d is %.2f times serial", chunk, ratio)
        return VectorEngine(chunk) if ratio > 1 else SerialEngine()

    def _chunks(self, training: LocalTraining, clients: list[Client]) -> list[int]:
        usual = self._usual(training, clients)
        if self.chunk:
            return [usual]
        return sorted({max(2, usual // 2), usual, min(len(clients), usual * 2)})

    def _usual(self, training: LocalTraining, clients: list[Client]) -> int:
        return self.chunk or max(2, min(chunk_size(training, clients[0]), len(clients)))


@dataclass(frozen=True)
class TimedTrial:
    """A few local steps of some clients."""

    run: Callable[[], object]
    clients: int

    def seconds(self) -> float:
        """Seconds a client; infinite if the work cannot be vectorised."""
        start = time.perf_counter()
        try:
            self.run()
        except (RuntimeError, NotImplementedError) as error:
            log.info("calibration: vector does not take this work: %s", error)
            return float("inf")
        return (time.perf_counter() - start) / self.clients


def seconds_per_client(
    training: LocalTraining, clients: list[Client], chunks: list[int]
) -> dict[int, float]:
    """The best seconds a client with chunks of each size; under 0 those of the serial engine.

    Trials are taken in turns, so that a slow moment of the machine hits all alike.
    """
    trials = {0: serial_trial(training, clients[:2])}
    trials |= {chunk: vector_trial(training, clients[:chunk]) for chunk in chunks}
    first = {size: trial.seconds() for size, trial in trials.items()}  # it traces
    able = [size for size, seconds in first.items() if seconds < float("inf")]
    turns = [{size: trials[size].seconds() for size in able} for _ in range(_TRIALS)]
    return first | {size: min(turn[size] for turn in turns) for size in able}


def serial_trial(training: LocalTraining, clients: list[Client]) -> TimedTrial:
    """One client after another."""
    return TimedTrial(lambda: [train_client(training, client) for client in clients], len(clients))


def vector_trial(training: LocalTraining, clients: list[Client]) -> TimedTrial:
    """All of them as one stack."""
    steps = TracedSteps()
    return TimedTrial(lambda: train_stack(training, clients, steps), len(clients))
