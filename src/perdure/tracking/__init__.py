"""Points of a run for TensorBoard and MLflow, while it goes on.

The lines of events.jsonl are the one source: a run that is resumed tells its trackers all lines
that it has, so no point is lost and none is there twice.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from perdure.config import Config, RunsConfig
from perdure.runs.events import is_progress
from perdure.tracking.timeline import Timeline

_log = logging.getLogger(__name__)


class Tracker(Protocol):
    """Somebody who is told of points."""

    def write(self, step: int, values: dict[str, float]) -> None:
        """Values after so many rounds."""

    def close(self, outcome: str) -> None:
        """The run has ended: `finished`, `failed` or `stopped`."""


class Tracking:
    """All trackers of a run."""

    def __init__(self, trackers: list[Tracker]) -> None:
        self._trackers, self._timeline = trackers, Timeline()

    def log(self, event: dict[str, Any]) -> None:
        """Pass one event on. A tracker that fails is left out: it must not end the run."""
        step, values = self._timeline.take(event)
        for tracker in list(self._trackers):
            try:
                tracker.write(step, values)
            except Exception as error:  # whatever a server or a full disk may do
                _log.warning("%s is left out from here on: %s", type(tracker).__name__, error)
                self._trackers.remove(tracker)

    def close(self, outcome: str) -> None:
        """Say how the run ended."""
        for tracker in self._trackers:
            try:
                tracker.close(outcome)
            except Exception as error:  # as above
                _log.warning("%s: %s", type(tracker).__name__, error)


def check_tracking(runs: RunsConfig) -> None:
    """Refuse what cannot be written to: a missing extra, a tracking server that does not answer."""
    if runs.tensorboard:
        from perdure.tracking.tensorboard import check_tensorboard

        check_tensorboard()
    if runs.mlflow:
        from perdure.tracking.mlflow import check_mlflow

        check_mlflow(runs.mlflow)


@contextmanager
def tracking(config: Config, folder: Path, events: list[dict[str, Any]]) -> Iterator[Tracking]:
    """The trackers that a config asks for, brought up to date with the events so far."""
    opened = Tracking(_open(config, folder))
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


def _open(config: Config, folder: Path) -> list[Tracker]:
    found: list[Tracker] = []
    if config.runs.tensorboard:
        from perdure.tracking.tensorboard import TensorBoardTracker

        found.append(TensorBoardTracker(folder))
    if config.runs.mlflow:
        from perdure.tracking.mlflow import MlflowTracker

        found.append(MlflowTracker(config, folder))
    return found
