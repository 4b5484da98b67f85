"""perdure watch: where running experiments stand."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table

from perdure.cli.console import setup_logging, stdout_console
from perdure.cli.interrupts import Stopped
from perdure.cli.tables import number, table
from perdure.core.errors import UserError
from perdure.report.comparison_text import format_bytes
from perdure.runs.progress import RunFollower, RunProgress
from perdure.runs.search import run_folders

_COLUMNS = ("run", "task", "round", "accuracy", "up", "down", "time", "left")


def watch(
    directory: Annotated[
        Path, typer.Argument(help="A run directory, or a folder of several.", metavar="DIR")
    ],
    once: Annotated[bool, typer.Option("--once", help="Say where it stands, and end.")] = False,
    every: Annotated[float, typer.Option(min=0.05, help="Seconds between two looks.")] = 1.0,
) -> None:
    """Follow runs that other processes make, until all have ended.

    Accuracy is the mean over the tasks so far. The time left is that of the pace since the watch
    began, or since the run began where nothing was seen yet.
    """
    setup_logging(quiet=True)
    watched = Watched(directory)
    watched.look()
    try:
        if once:
            stdout_console().print(overview(watched.standings))
        elif sys.stdout.isatty():
            _live(watched, every)
        else:
            _lines(watched, every, stdout_console())
    except KeyboardInterrupt:
        raise Stopped("the runs themselves go on") from None


class Watched:
    """All runs below a folder, also those that begin later."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.followers: dict[str, RunFollower] = {}
        self.standings: dict[str, RunProgress] = {}

    def look(self) -> None:
        """Find new runs and read on in all."""
        if not self.folder.is_dir():
            raise UserError(f"{self.folder}: no such directory")
        for path in [*run_folders(self.folder), *announced(self.folder)]:
            name = self._name(path)
            self.followers.setdefault(name, RunFollower(path))
        if not self.followers:
            raise UserError(f"{self.folder}: no run directory at or below it")
        self.standings = {name: each.poll() for name, each in self.followers.items()}

    @property
    def ended(self) -> bool:
        """Whether every run has its result."""
        return all(standing.finished for standing in self.standings.values())

    def _name(self, path: Path) -> str:
        return str(path.relative_to(self.folder)) if path != self.folder else path.resolve().name


def announced(folder: Path) -> list[Path]:
    """The runs that a comparison will make, begun or not."""
    try:
        plan = json.loads((folder / "comparison.json").read_text(encoding="utf-8"))
        return [folder / run["path"] for run in plan["runs"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def overview(standings: dict[str, RunProgress]) -> Table:
    """A row a run."""
    made = table("", _COLUMNS)
    for name, standing in standings.items():
        made.add_row(name, *cells(standing))
    return made


def cells(standing: RunProgress) -> list[str]:
    """Where a run stands, a text for each column."""
    if not standing.started:
        return ["waiting", *[""] * (len(_COLUMNS) - 2)]
    accuracy = (
        f"{standing.mode} {number(standing.accuracy)}" if standing.accuracy is not None else "-"
    )
    left = "ended" if standing.finished else duration(standing.seconds_left)
    return [
        f"{standing.task + 1}/{standing.tasks or '?'}",
        f"{standing.rounds}/{standing.total_rounds or '?'}",
        accuracy,
        format_bytes(standing.bytes_up),
        format_bytes(standing.bytes_down),
        duration(standing.seconds),
        left,
    ]


def duration(seconds: float | None) -> str:
    """Hours, minutes and seconds, as far as they are needed."""
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _live(watched: Watched, every: float) -> None:
    with Live(overview(watched.standings), console=stdout_console(), auto_refresh=False) as live:
        while not watched.ended:
            time.sleep(every)
            watched.look()
            live.update(overview(watched.standings), refresh=True)


def _lines(watched: Watched, every: float, console: Console) -> None:
    """A line whenever a run has done another round or has ended."""
    shown: dict[str, tuple[int, bool]] = {}
    while True:
        for name, standing in watched.standings.items():
            now = (standing.rounds, standing.finished)
            if standing.started and shown.get(name) != now:
                shown[name] = now
                texts = zip(_COLUMNS[1:], cells(standing), strict=True)
                console.print(f"{name}: " + ", ".join(f"{key} {text}" for key, text in texts))
        if watched.ended:
            return
        time.sleep(every)
        watched.look()
