"""perdure watch: follow the progress of runs."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table

from perdure.cli.console import Stopped, number, print_json, setup_logging, stdout_console, table
from perdure.cli.options import Json
from perdure.core.documents import json_value
from perdure.core.errors import UserError
from perdure.report.tables import format_bytes
from perdure.runs.directory import run_folders
from perdure.runs.progress import RunFollower, RunProgress

_COLUMNS = ("run", "task", "round", "accuracy", "up", "down", "time", "left")


def watch(
    directory: Annotated[
        Path, typer.Argument(help="A run directory, or a folder of several.", metavar="DIR")
    ],
    once: Annotated[
        bool, typer.Option("--once", help="Print the current status and exit.")
    ] = False,
    every: Annotated[float, typer.Option(min=0.05, help="Seconds between two updates.")] = 1.0,
    as_json: Json = False,
) -> None:
    """Follow runs of other processes until all of them have ended.

    The accuracy is the mean over the tasks so far. The remaining time is estimated from the rounds
    since the command started, or if there are none, from those since the run started.
    """
    setup_logging(quiet=True)
    if as_json and not once:
        raise UserError("--json: requires --once")
    watched = WatchedRuns(directory)
    watched.update()
    try:
        if as_json:
            print_json({name: asdict(run) for name, run in watched.progress.items()})
        elif once:
            stdout_console().print(progress_table(watched.progress))
        elif sys.stdout.isatty():
            _live(watched, every)
        else:
            _print_changes(watched, every, stdout_console())
    except KeyboardInterrupt:
        raise Stopped("the runs themselves continue") from None


class WatchedRuns:
    """All runs below a folder, including those that start later."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.followers: dict[str, RunFollower] = {}
        self.progress: dict[str, RunProgress] = {}

    def update(self) -> None:
        """Find new runs and read the latest progress of all runs."""
        if not self.folder.is_dir():
            raise UserError(f"{self.folder}: no such directory")
        for path in [*run_folders(self.folder), *planned_runs(self.folder)]:
            name = self._name(path)
            self.followers.setdefault(name, RunFollower(path))
        if not self.followers:
            raise UserError(f"{self.folder}: contains no run directory")
        self.progress = {name: follower.poll() for name, follower in self.followers.items()}

    @property
    def ended(self) -> bool:
        """Whether every run has a result."""
        return all(run.finished for run in self.progress.values())

    def _name(self, path: Path) -> str:
        return str(path.relative_to(self.folder)) if path != self.folder else path.resolve().name


def planned_runs(folder: Path) -> list[Path]:
    """Return the runs of a comparison, started or not."""
    try:
        plan = json_value((folder / "comparison.json").read_bytes())
        return [folder / run["path"] for run in plan["runs"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def progress_table(runs: dict[str, RunProgress]) -> Table:
    """Return a table with one row per run."""
    filled = table("", _COLUMNS)
    for name, progress in runs.items():
        filled.add_row(name, *cells(progress))
    return filled


def cells(progress: RunProgress) -> list[str]:
    """Return the progress of a run, one text per column after the first."""
    if not progress.started:
        return ["waiting", *[""] * (len(_COLUMNS) - 2)]
    accuracy = (
        f"{progress.mode} {progress.measure}{number(progress.accuracy)}"
        if progress.accuracy is not None
        else "-"
    )
    left = "ended" if progress.finished else duration(progress.seconds_left)
    return [
        f"{progress.task + 1}/{progress.tasks or '?'}",
        f"{progress.rounds}/{progress.total_rounds or '?'}",
        accuracy,
        format_bytes(progress.bytes_up),
        format_bytes(progress.bytes_down),
        duration(progress.seconds),
        left,
    ]


def duration(seconds: float | None) -> str:
    """Return a duration as H:MM:SS or M:SS, or a dash for None."""
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _live(watched: WatchedRuns, every: float) -> None:
    with Live(
        progress_table(watched.progress), console=stdout_console(), auto_refresh=False
    ) as live:
        while not watched.ended:
            time.sleep(every)
            watched.update()
            live.update(progress_table(watched.progress), refresh=True)


def _print_changes(watched: WatchedRuns, every: float, console: Console) -> None:
    """Print a line whenever a run has finished another round or has ended."""
    shown: dict[str, tuple[int, bool]] = {}
    while True:
        for name, progress in watched.progress.items():
            now = (progress.rounds, progress.finished)
            if progress.started and shown.get(name) != now:
                shown[name] = now
                texts = zip(_COLUMNS[1:], cells(progress), strict=True)
                console.print(f"{name}: " + ", ".join(f"{key} {text}" for key, text in texts))
        if watched.ended:
            return
        time.sleep(every)
        watched.update()
