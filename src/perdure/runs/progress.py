"""Where a run stands, read from its directory while another process writes it."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from perdure.config import Config, load
from perdure.core.errors import UserError
from perdure.runs.events import event_of, is_progress


@dataclass(frozen=True)
class RunProgress:
    """How far a run has come."""

    begun: bool = False
    finished: bool = False
    task: int = 0
    """The task at work, from 0."""
    tasks: int | None = None
    rounds: int = 0
    """Rounds done in all."""
    total_rounds: int | None = None
    mode: str = "task_agnostic"
    accuracy: float | None = None
    """Mean over the tasks so far, after the last task that was finished."""
    up: int = 0
    down: int = 0
    seconds: float = 0.0
    """At work; while it goes on, from its beginning to its last line, pauses included."""
    seconds_left: float | None = None


def expected_tasks(config: Config) -> int | None:
    """The number of tasks as far as the config alone tells it."""
    stream = config.stream
    if stream.kind != "domains":
        return stream.tasks
    if stream.domains:
        return min(stream.tasks, len(stream.domains))
    usual = type(stream).model_fields["tasks"].default  # said by nobody: as many as there are
    return None if stream.tasks == usual else stream.tasks


def accuracies_so_far(event: dict[str, Any]) -> tuple[str, list[float]]:
    """The mode and the accuracies on all tasks so far, of a task's end."""
    rows = event["accuracy"]
    mode = "routed" if rows.get("routed") and rows["routed"][0] is not None else "task_agnostic"
    return mode, [value for value in rows[mode] if value is not None]


class RunFollower:
    """Reads what a run adds to events.jsonl, whole lines only."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self.path, self._clock = path, clock
        self._config: Config | None = None
        self._offset = 0
        self._standing = RunProgress()
        self._earlier_bytes = {"up": 0, "down": 0}
        self._now = {"up": 0, "down": 0}
        self._first_seen: tuple[float, int] | None = None

    def poll(self) -> RunProgress:
        """Read on, and say where the run stands."""
        if not self._standing.begun and not self._begin():
            return self._standing
        for event in self._new_events():
            self._take(event)
        finished = (self.path / "result.json").is_file()
        self._standing = replace(self._standing, finished=finished, seconds=self._seconds())
        self._standing = replace(self._standing, seconds_left=self._left())
        return self._standing

    def _begin(self) -> bool:
        if not (self.path / "config.yaml").is_file():
            return False
        with contextlib.suppress(UserError):  # of another version: then only its lines count
            self._config = load(self.path / "config.yaml")
        tasks = expected_tasks(self._config) if self._config else None
        in_all = self._rounds_in_all(tasks)
        self._standing = RunProgress(begun=True, tasks=tasks, total_rounds=in_all)
        return True

    def _rounds_in_all(self, tasks: int | None) -> int | None:
        if tasks is None or self._config is None:
            return None
        return self._config.total_rounds(tasks)

    def _new_events(self) -> list[dict[str, Any]]:
        path = self.path / "events.jsonl"
        size = path.stat().st_size if path.is_file() else 0
        if size < self._offset:  # resumed from an earlier checkpoint: its lines come once more
            self._offset = 0
            self._begin()
            self._earlier_bytes = self._now = {"up": 0, "down": 0}
        if size == self._offset:
            return []
        with path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        found = [event_of(line) for line in whole.splitlines()]
        return [event for event in found if event is not None and is_progress(event)]

    def _take(self, event: dict[str, Any]) -> None:
        self._now = event["bytes"]
        up, down = (self._earlier_bytes[way] + self._now[way] for way in ("up", "down"))
        standing = replace(self._standing, up=up, down=down)
        if event["event"] == "round":
            standing = replace(standing, task=event["task"], rounds=standing.rounds + 1)
        else:
            self._earlier_bytes = {"up": up, "down": down}
            standing = self._after_task(standing, event)
        self._standing = standing

    def _after_task(self, standing: RunProgress, event: dict[str, Any]) -> RunProgress:
        mode, values = accuracies_so_far(event)
        tasks = len(event["accuracy"]["task_agnostic"])
        return replace(
            standing,
            tasks=tasks,
            total_rounds=self._rounds_in_all(tasks),
            task=min(event["task"] + 1, tasks - 1),
            mode=mode,
            accuracy=sum(values) / len(values),
        )

    def _seconds(self) -> float:
        """By the files' own times: lines carry no clock, so that equal runs have equal lines.

        A run that has ended says itself how long it was at work.
        """
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            result = json.loads((self.path / "result.json").read_bytes())
            return float(result["seconds"]["total"])
        begun, last = self.path / "config.yaml", self.path / "events.jsonl"
        if not last.is_file():
            return 0.0
        return max(0.0, last.stat().st_mtime - begun.stat().st_mtime)

    def _left(self) -> float | None:
        """At the pace seen while following; before that, at the pace since the beginning."""
        done, in_all = self._standing.rounds, self._standing.total_rounds
        now = self._clock()
        if self._first_seen is None:
            self._first_seen = (now, done)
        if in_all is None or self._standing.finished or done == 0:
            return 0.0 if self._standing.finished else None
        since, before = self._first_seen
        if done > before:
            return (now - since) / (done - before) * (in_all - done)
        return self._standing.seconds / done * (in_all - done)
