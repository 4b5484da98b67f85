"""The progress of a run, read from its directory while another process writes it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from perdure.config import Config, load_saved
from perdure.core.documents import is_number, json_value
from perdure.core.errors import UserError
from perdure.core.event_log import EventTotals, LineReader, progress_events

if TYPE_CHECKING:
    from perdure.core.event_log import Event


@dataclass(frozen=True)
class RunProgress:
    """How far a run is."""

    started: bool = False
    """Whether the run directory exists."""
    finished: bool = False
    task: int = 0
    """The current task, from 0."""
    tasks: int | None = None
    """Number of tasks. None if it is not known yet."""
    rounds: int = 0
    """Finished rounds, over all tasks."""
    total_rounds: int | None = None
    """Rounds of the whole run. None if it is not known yet."""
    mode: str = "task_agnostic"
    """Inference mode of `accuracy`."""
    accuracy: float | None = None
    """Mean accuracy (R2 of numbers) over the tasks so far, after the last finished task."""
    measure: str = ""
    """Name of `accuracy` if it is another measure, with a space."""
    bytes_up: int = 0
    bytes_down: int = 0
    seconds: float = 0.0
    """Training time of a finished run; else the time from its start to its last event."""
    seconds_left: float | None = None
    """Estimated time to the end. None if it cannot be estimated."""


def expected_tasks(config: Config) -> int | None:
    """Return the number of tasks, or None if only the data can tell it."""
    return config.task_total if config.extensions else config.stream.expected_tasks


def accuracies_so_far(event: Event) -> tuple[str, list[float]]:
    """Return the inference mode and the accuracies on the tasks so far of a task's event.

    The mode is "routed" if the method routes, else "task_agnostic".
    """
    rows = event["accuracy"]
    mode = "routed" if rows.get("routed") and rows["routed"][0] is not None else "task_agnostic"
    return mode, [value for value in rows[mode] if value is not None]


class RunFollower:
    """Follows the events of a run that another process trains."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self.path, self._clock = path, clock
        self._config: Config | None = None
        self._lines = LineReader(path / "events.jsonl")
        self._totals = EventTotals()
        self._progress = RunProgress()
        self._first_poll: tuple[float, int] | None = None
        """Time of the first poll, and the rounds that were finished then."""

    def poll(self) -> RunProgress:
        """Read the new events and return the progress of the run."""
        if not self._progress.started and not self._start():
            return self._progress
        events = progress_events(self._lines.read_new())
        if self._lines.was_truncated:
            self._start()
        for event in events:
            self._add(event)
        finished = self._is_finished()
        self._progress = replace(self._progress, finished=finished, seconds=self._seconds())
        self._progress = replace(self._progress, seconds_left=self._seconds_left())
        return self._progress

    def _is_finished(self) -> bool:
        """Return whether there is a result, and of all tasks: a run may have been extended."""
        if not (self.path / "result.json").is_file():
            return False
        tasks = self._config.task_total if self._config and self._config.extensions else 0
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return bool(json_value((self.path / "result.json").read_bytes())["tasks"] >= tasks)
        return True

    def _start(self) -> bool:
        if not (self.path / "config.yaml").is_file():
            return False
        with contextlib.suppress(UserError):  # a config that cannot be read: use the events alone
            self._config = load_saved(self.path / "config.yaml")
        tasks = expected_tasks(self._config) if self._config else None
        rounds = self._total_rounds(tasks)
        self._totals = EventTotals()
        measure = "r2 " if self._config and self._config.data.target == "number" else ""
        self._progress = RunProgress(
            started=True, tasks=tasks, total_rounds=rounds, measure=measure
        )
        return True

    def _total_rounds(self, tasks: int | None) -> int | None:
        if tasks is None or self._config is None:
            return None
        return self._config.total_rounds(tasks)

    def _add(self, event: Event) -> None:
        self._totals.add(event)
        self._progress = replace(
            self._progress,
            rounds=self._totals.rounds,
            bytes_up=self._totals.bytes["up"],
            bytes_down=self._totals.bytes["down"],
        )
        if event["event"] == "round" or "accuracy" not in event:
            self._progress = replace(self._progress, task=event["task"])
        else:
            self._progress = self._after_task(event)

    def _after_task(self, event: Event) -> RunProgress:
        mode, accuracies = accuracies_so_far(event)
        tasks = len(event["accuracy"]["task_agnostic"])
        return replace(
            self._progress,
            tasks=tasks,
            total_rounds=self._total_rounds(tasks),
            task=min(event["task"] + 1, tasks - 1),
            mode=mode,
            accuracy=sum(accuracies) / len(accuracies),
        )

    def _seconds(self) -> float:
        """Return the seconds of result.json, or else the difference of two files' times.

        Events contain no times, so that equal runs write equal events.
        """
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            seconds = json_value((self.path / "result.json").read_bytes())["seconds"]["total"]
            if is_number(seconds):
                return float(seconds)
        config, events = self.path / "config.yaml", self.path / "events.jsonl"
        if not events.is_file():
            return 0.0
        return max(0.0, events.stat().st_mtime - config.stat().st_mtime)

    def _seconds_left(self) -> float | None:
        """Estimate by the pace since the first poll; before a round since then, since the start."""
        done, total = self._progress.rounds, self._progress.total_rounds
        now = self._clock()
        if self._first_poll is None:
            self._first_poll = (now, done)
        if total is None or self._progress.finished or done == 0:
            return 0.0 if self._progress.finished else None
        since, before = self._first_poll
        if done > before:
            return (now - since) / (done - before) * (total - done)
        return self._progress.seconds / done * (total - done)
