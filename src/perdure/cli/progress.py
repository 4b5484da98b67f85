"""What is seen while a run goes on: bars on a terminal, a line a task elsewhere, or nothing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from perdure.cli.console import stdout_console
from perdure.cli.tables import number
from perdure.config import Config
from perdure.runs.progress import accuracies_so_far, expected_tasks
from perdure.training.events import Event, EventCallback
from perdure.training.state import RunState


@contextmanager
def watching(config: Config, quiet: bool, name: str = "") -> Iterator[EventCallback | None]:
    """Something to tell of each round and task; `name` tells several runs apart."""
    if quiet:
        yield None
    elif sys.stdout.isatty():
        with Bars(config, name) as bars:
            yield bars
    else:
        yield Lines(config, name, stdout_console()).print_event


class Lines:
    """One line a task."""

    def __init__(self, config: Config, name: str, console: Console) -> None:
        self.config, self.console = config, console
        self.name = f"{name} " if name else ""

    def print_event(self, state: RunState, event: Event) -> None:
        """Called after each round and each task's end."""
        if event["event"] != "task":
            return
        mode, values = accuracies_so_far(event)
        tasks = len(event["accuracy"]["task_agnostic"])
        mean = sum(values) / len(values)
        self.console.print(
            f"{self.name}task {event['task'] + 1} of {tasks}: {mode} accuracy "
            f"{number(values[-1])} on it, {number(mean)} on all so far; "
            f"{state.counters.rounds} rounds, {state.seconds['total']:.1f} s"
        )


class Bars:
    """Bars for tasks, rounds and clients, with the time left and the current accuracy."""

    def __init__(self, config: Config, name: str) -> None:
        self.config, self.name = config, name
        self.tasks = expected_tasks(config)
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=stdout_console(),
        )
        self.all = self.progress.add_task(self._title("all rounds"), total=self._rounds(), note="")
        self.now = self.progress.add_task(self._named(0), total=config.rounds(0), note="")
        self.clients = self.progress.add_task("clients", total=config.clients.per_round, note="")
        self.begun = False
        self.asked: tuple[int, ...] = ()

    def __enter__(self) -> Bars:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def __call__(self, state: RunState, event: Event) -> None:
        """Called after each round and at each task's end."""
        if event["event"] == "task":
            self._task_ends(state, event)
        else:
            self._round_ends(state, event)

    def during(self, state: RunState, event: Event) -> None:
        """Called while the clients of a round report."""
        if not self.begun:
            self._begin(state)
        asked = (event["task"], event["round"], event["attempt"])
        if asked != self.asked:
            self.asked = asked
            self.progress.reset(self.clients, total=event["sampled"])
        self.progress.advance(self.clients, event["done"])

    def _begin(self, state: RunState) -> None:
        """A resumed run begins in the middle: its old rounds say nothing about the time left."""
        self.begun = True
        self.progress.reset(self.all, total=self._rounds(), completed=state.counters.rounds)

    def _round_ends(self, state: RunState, event: Event) -> None:
        clients = f"{event['clients']} of {event['sampled']} clients reported"
        found = event.get("accuracy")
        note = f"{clients}, accuracy {number(found['task_agnostic'])}" if found else clients
        self.progress.update(self.all, completed=state.counters.rounds)
        self._show_task(event["task"], state.round, note)

    def _task_ends(self, state: RunState, event: Event) -> None:
        self.tasks = len(event["accuracy"]["task_agnostic"])
        mode, values = accuracies_so_far(event)
        note = f"{mode} accuracy {number(sum(values) / len(values))} after task {state.task}"
        done = state.counters.rounds
        self.progress.update(self.all, total=self._rounds(), completed=done, note=note)
        if state.task < self.tasks:
            self._show_task(state.task, 0, "")

    def _show_task(self, task: int, done: int, note: str) -> None:
        self.progress.update(
            self.now,
            description=self._named(task),
            total=self.config.rounds(task),
            completed=done,
            note=note,
        )

    def _named(self, task: int) -> str:
        return f"task {task + 1} of {self.tasks}" if self.tasks else f"task {task + 1}"

    def _rounds(self) -> int | None:
        if self.tasks is None:
            return None
        return self.config.total_rounds(self.tasks)

    def _title(self, text: str) -> str:
        return f"{self.name} {text}".strip()
