"""Progress of several runs: bars on a terminal, one line per run elsewhere, or nothing."""

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
def show_run_progress(quiet: bool) -> Iterator[ProgressView]:
    """Yield a view for the kind of output; one that shows nothing if `quiet`."""
    if quiet:
        yield NoProgress()
    elif sys.stdout.isatty():
        with RunProgressBars() as bars:
            yield bars
    else:
        yield PlainRunProgress(stdout_console())


class PlainRunProgress:
    """Prints one line per run."""

    def __init__(self, console: Console) -> None:
        self.console, self.runs, self.done = console, 0, 0

    def begin(self, runs: int, finished: int) -> None:
        """Print the number of runs, before the first of them."""
        self.runs, self.done = runs, finished
        already = f", {finished} already finished" if finished else ""
        self.console.print(f"{runs} runs{already}")

    def update(self, run: PlannedRun, progress: RunProgress) -> None:
        """Print nothing: one line per run is enough."""

    def end(self, run: PlannedRun, progress: RunProgress, failure: FailedRun | None) -> None:
        """Print the line of a run."""
        self.done += failure is None
        self.console.print(f"[{self.done} of {self.runs}] {run.name}: {outcome(progress, failure)}")


class RunProgressBars:
    """One bar for the comparison and one for each active run."""

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

    def __enter__(self) -> RunProgressBars:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def begin(self, runs: int, finished: int) -> None:
        """Add the bar of the comparison, before the first run."""
        self.all = self.progress.add_task("all runs", total=runs, completed=finished, note="")

    def update(self, run: PlannedRun, progress: RunProgress) -> None:
        """Update the bar of a run, which counts rounds."""
        if run.name not in self.bars:
            self.bars[run.name] = self.progress.add_task(run.name, total=None, note="starting")
        if progress.started:
            self.progress.update(
                self.bars[run.name],
                total=progress.total_rounds,
                completed=progress.rounds,
                note=note(progress),
            )

    def end(self, run: PlannedRun, progress: RunProgress, failure: FailedRun | None) -> None:
        """Replace the bar of a run by a line above the bars."""
        bar = self.bars.pop(run.name, None)
        if bar is not None:
            self.progress.remove_task(bar)
        self.progress.console.print(f"{run.name}: {outcome(progress, failure)}")
        if self.all is not None and failure is None:
            self.progress.advance(self.all)


def note(progress: RunProgress) -> str:
    """Return the task and the accuracy of a run as text."""
    of = f" of {progress.tasks}" if progress.tasks else ""
    accuracy = f", {progress.mode} {number(progress.accuracy)}" if progress.accuracy else ""
    return f"task {progress.task + 1}{of}{accuracy}"


def outcome(progress: RunProgress, failure: FailedRun | None) -> str:
    """Return the outcome of a run as text."""
    if failure is not None:
        return f"failed: {failure.reason}"
    return (
        f"{progress.mode} ACC {number(progress.accuracy)}, "
        f"{progress.rounds} rounds, {progress.seconds:.1f} s"
    )
