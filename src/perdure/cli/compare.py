"""perdure compare: run methods, settings and seeds side by side."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from perdure.cli.console import (
    number,
    print_json,
    setup_logging,
    shell_command,
    stdout_console,
    stoppable,
    table,
)
from perdure.cli.options import ConfigPath, Json, Quiet, Settings, importing_from, repeat_option
from perdure.config import override, read_yaml
from perdure.core.errors import RunError
from perdure.recipes import find_config
from perdure.report.comparison import DIVIDER, Comparison
from perdure.report.records import ROW_TITLES, Selection
from perdure.report.tables import NOTE, TableStyle, read_metrics, short_tables
from perdure.runs.compare.compare import Outcome, run_plan
from perdure.runs.compare.plan import PlannedRun, plan, plan_references
from perdure.runs.compare.processes import FailedRun, NoProgress, ProgressView
from perdure.runs.compare.variants import read_methods, read_seeds, read_sweep
from perdure.runs.progress import RunProgress

# ---- Progress of several runs: bars on a terminal, one line per run elsewhere, or nothing


@contextmanager
def show_run_progress(quiet: bool) -> Iterator[ProgressView]:
    """Yield a view for the kind of output; one that shows nothing if `quiet`."""
    if quiet:
        yield NoProgress()
    elif sys.stdout.isatty():
        bars = RunProgressBars()
        with bars.progress:
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


# ---- The main metrics of a comparison as tables for a terminal; files hold all of them


def comparison_tables(
    comparison: Comparison, style: TableStyle | None = None
) -> Iterator[Table]:  # fmt: skip
    """Yield one table per inference mode, and one of the costs."""
    for shown in short_tables(comparison, style, differences=("ACC",)):
        yield _table(shown.title, *shown.texts())


def selection_table(selection: Selection) -> Table:
    """Return the table of the validation scores of all settings."""
    return _table("settings on validation rows", ROW_TITLES, selection.rows())


def print_notes(console: Console, comparison: Comparison) -> None:
    """Print what the numbers of the tables mean, and what the methods have in common."""
    for note in (NOTE, *comparison.notes):
        console.print(note, markup=False, highlight=False)


def _table(title: str, header: list[str], rows: list[list[str]]) -> Table:
    filled = table(title, header)
    for row in rows:
        if row[0] == DIVIDER:
            filled.add_section()
        filled.add_row(*row)
    return filled


# ---- perdure compare: run methods, settings and seeds side by side

Jobs = Annotated[
    int | None,
    typer.Option(min=1, help="Number of parallel runs. Default: one per core.", metavar="N"),
]


def compare(
    path: ConfigPath,
    methods: Annotated[
        str,
        typer.Option(
            help="Kinds, with hyperparameters after colons: fedavg,fot:threshold=0.9.",
            metavar="A,B,C",
        ),
    ],
    out: Annotated[Path, typer.Option(help="The folder of the comparison.", metavar="DIR")],
    seeds: Annotated[str, typer.Option(help="Such as 0,1,2 or 0-4.")] = "0,1,2",
    settings: Settings = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(help="Run with each value of a key; repeatable.", metavar="KEY=V,V"),
    ] = None,
    references: Annotated[
        str,
        typer.Option(help="References to add: closed-form (cheap), all or none.", metavar="SET"),
    ] = "closed-form",
    select: Annotated[
        str | None,
        typer.Option(
            help="validation: show of each method the setting that is best on validation rows.",
            metavar="ROWS",
        ),
    ] = None,
    metrics: Annotated[
        str, typer.Option(help="Metrics and costs that tables show: ACC,FGT.", metavar="A,B")
    ] = "",
    percent: Annotated[bool, typer.Option("--percent", help="Show shares in percent.")] = False,
    jobs: Jobs = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Run every method with every seed, and print means, deviations and differences.

    Repeat the command to resume after a stop, or with more methods and seeds to add them: finished
    runs are not repeated.
    """
    setup_logging(quiet=True)  # every run has its own log
    sweeps = [read_sweep(text) for text in sweep or []]
    values = override(read_yaml(find_config(path)), settings or [])
    command = rerun_command(path, methods, out, seeds, settings, sweep, references, select, jobs)
    command += [*(["--metrics", metrics] if metrics else []), *(["--percent"] if percent else [])]
    with importing_from(path.parent), stoppable(command):
        planned = plan(values, read_methods(methods), read_seeds(seeds), sweeps)
        planned += plan_references(values, references, planned, path.parent)
        with show_run_progress(quiet or as_json) as view:
            style = TableStyle(read_metrics(metrics), percent)
            outcome = run_plan(planned, out, jobs, view, path.parent, select, style)
    if as_json:
        print_json(document(outcome))
    else:
        print_outcome(outcome)
    raise_failures(outcome, command)


def rerun_command(
    path: Path,
    methods: str,
    out: Path,
    seeds: str,
    settings: list[str] | None,
    sweep: list[str] | None,
    references: str,
    select: str | None,
    jobs: int | None,
) -> list[str]:
    """Return the command that resumes a comparison, which is the command that started it."""
    changes, swept = repeat_option("--set", settings), repeat_option("--sweep", sweep)
    selected = ["--select", select] if select is not None else []
    parallel = ["--jobs", str(jobs)] if jobs is not None else []
    return [
        "perdure", "compare", str(path), "--methods", methods, "--seeds", seeds,
        *changes, *swept, "--references", references, *selected, "--out", str(out), *parallel,
    ]  # fmt: skip


def document(outcome: Outcome) -> dict[str, Any]:
    """Return the content of comparison.json."""
    text = (outcome.out / "comparison.json").read_text(encoding="utf-8")
    content: dict[str, Any] = json.loads(text)
    return content


def print_outcome(outcome: Outcome) -> None:
    """Print the tables of a comparison, and name the files with all metrics."""
    if outcome.comparison is None:
        return
    console = stdout_console()
    if outcome.selection is not None:
        console.print(selection_table(outcome.selection))
    for shown in comparison_tables(outcome.comparison, outcome.style):
        console.print(shown)
    print_notes(console, outcome.comparison)
    page = shell_command(["perdure", "report", str(outcome.out), "--html", "report.html"])
    console.print(f"as files: table.csv (all metrics), table.md and table-*.tex in {outcome.out}")
    console.print(f"with figures: {page}")


def raise_failures(outcome: Outcome, command: list[str]) -> None:
    """Raise RunError if some runs failed, after everything else was done."""
    if outcome.failures:
        named = "; ".join(f"{failed.run.name} ({failed.reason})" for failed in outcome.failures)
        count = len(outcome.failures)
        raise RunError(f"{count} failed: {named}; resume with: {shell_command(command)}")
