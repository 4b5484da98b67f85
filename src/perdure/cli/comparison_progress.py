"""One view of many runs: bars on a terminal, a line a run elsewhere, or nothing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from perdure.cli.console import stdout_console
from perdure.cli.tables import number
from perdure.comparison.plan import PlannedRun
from perdure.comparison.processes import FailedRun, NoProgress, ProgressView
from perdure.runs.progress import RunProgress


@contextmanager
def viewing(quiet: bool) -> Iterator[ProgressView]:
    """A view that fits where the words go."""
    if quiet:
        yield NoProgress()
    elif sys.stdout.isatty():
        with RunBars() as bars:
            yield bars
    else:
        yield RunLines(stdout_console())


class RunLines:
    """One line a run."""

    def __init__(self, console: Console) -> None:
        self.console, self.runs, self.done = console, 0, 0

    def begin(self, runs: int, finished: int) -> None:
        """Before the first run."""
        self.runs, self.done = runs, finished
        there = f", {finished} of them finished before" if finished else ""
        self.console.print(f"{runs} runs{there}")

    def update(self, run: PlannedRun, standing: RunProgress) -> None:
        """Nothing: a line a run is enough."""

    def end(self, run: PlannedRun, standing: RunProgress, failure: FailedRun | None) -> None:
        """The line."""
        self.done += failure is None
        self.console.print(f"[{self.done} of {self.runs}] {run.name}: {outcome(standing, failure)}")


class RunBars:
    """A bar for the comparison and one for each run at work."""

    def __init__(self) -> None:
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
            console=stdout_console(),
        )
        self.all: TaskID | None = None
        self.bars: dict[str, TaskID] = {}

    def __enter__(self) -> RunBars:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def begin(self, runs: int, finished: int) -> None:
        """Before the first run."""
        self.all = self.progress.add_task("all runs", total=runs, completed=finished, note="")

    def update(self, run: PlannedRun, standing: RunProgress) -> None:
        """A run's bar, which counts rounds."""
        if run.name not in self.bars:
            self.bars[run.name] = self.progress.add_task(run.name, total=None, note="starting")
        if standing.started:
            self.progress.update(
                self.bars[run.name],
                total=standing.total_rounds,
                completed=standing.rounds,
                note=note(standing),
            )

    def end(self, run: PlannedRun, standing: RunProgress, failure: FailedRun | None) -> None:
        """The run's bar becomes a line above the bars."""
        bar = self.bars.pop(run.name, None)
        if bar is not None:
            self.progress.remove_task(bar)
        self.progress.console.print(f"{run.name}: {outcome(standing, failure)}")
        if self.all is not None and failure is None:
            self.progress.advance(self.all)


def note(standing: RunProgress) -> str:
    """Where a run stands, in a few words."""
    of = f" of {standing.tasks}" if standing.tasks else ""
    accuracy = f", {standing.mode} {number(standing.accuracy)}" if standing.accuracy else ""
    return f"task {standing.task + 1}{of}{accuracy}"


def outcome(standing: RunProgress, failure: FailedRun | None) -> str:
    """How a run ended."""
    if failure is not None:
        return f"failed: {failure.reason}"
    return (
        f"{standing.mode} ACC {number(standing.accuracy)}, "
        f"{standing.rounds} rounds, {standing.seconds:.1f} s"
    )
