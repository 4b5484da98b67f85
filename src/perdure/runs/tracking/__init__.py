"""Metric values of a run in TensorBoard and MLflow, written while it trains.

The lines of events.jsonl are the one source. A resumed run passes all lines that it has to its
trackers, so no value is lost and none is written twice.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from perdure.config import Config, RunsConfig
from perdure.core.event_log import Event, is_progress
from perdure.runs.tracking.event_metrics import EventMetrics

_log = logging.getLogger(__name__)


class Tracker(Protocol):
    """Receives metric values, such as TensorBoard or MLflow."""

    def write(self, step: int, values: dict[str, float]) -> None:
        """Receive the metric values after `step` rounds, by name."""

    def close(self, outcome: str) -> None:
        """Receive the end of the run: "finished", "failed" or "stopped"."""


class Tracking:
    """All trackers of a run."""

    def __init__(self, trackers: list[Tracker]) -> None:
        self._trackers, self._metrics = trackers, EventMetrics()

    def log(self, event: Event) -> None:
        """Pass the values of one event to all trackers.

        A tracker that fails is not used again; it must not end the run.
        """
        if not self._trackers:
            return
        step, values = self._metrics.extract(event)
        for tracker in list(self._trackers):
            try:
                tracker.write(step, values)
            except Exception as error:  # of a server, a network or a full disk
                _log.warning("%s is not used again: %s", type(tracker).__name__, error)
                self._trackers.remove(tracker)

    def close(self, outcome: str) -> None:
        """Pass the end of the run to all trackers; `outcome` as in `Tracker.close`."""
        for tracker in self._trackers:
            try:
                tracker.close(outcome)
            except Exception as error:  # as above
                _log.warning("%s: %s", type(tracker).__name__, error)


def check_tracking(runs: RunsConfig) -> None:
    """Refuse trackers whose extra is not installed or whose server does not answer."""
    if runs.tensorboard:
        from perdure.runs.tracking.tensorboard import check_tensorboard

        check_tensorboard()
    if runs.mlflow:
        from perdure.runs.tracking.mlflow import check_mlflow

        check_mlflow(runs.mlflow)


@contextmanager
def open_tracking(config: Config, folder: Path, events: list[Event]) -> Iterator[Tracking]:
    """Open the trackers of a config, and close them with the outcome of the enclosed block."""
    trackers: list[Tracker] = []
    if config.runs.tensorboard:
        from perdure.runs.tracking.tensorboard import TensorBoardTracker

        trackers.append(TensorBoardTracker(folder))
    if config.runs.mlflow:
        from perdure.runs.tracking.mlflow import MlflowTracker

        trackers.append(MlflowTracker(config, folder))
    opened = Tracking(trackers)
    outcome = "failed"
    try:
        for event in filter(is_progress, events):
            opened.log(event)
        yield opened
        outcome = "finished"
    except KeyboardInterrupt:
        outcome = "stopped"
        raise
    finally:
        opened.close(outcome)
