"""perdure compare: run methods, settings and seeds side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from perdure.cli.arguments import (
    ConfigPath,
    Json,
    Quiet,
    Settings,
    importing_from,
    repeat_option,
)
from perdure.cli.comparison_progress import show_run_progress
from perdure.cli.comparison_tables import comparison_tables, print_notes, selection_table
from perdure.cli.console import print_json, setup_logging, stdout_console
from perdure.cli.interrupts import shell_command, stoppable
from perdure.comparison.compare import Outcome, run_plan
from perdure.comparison.plan import plan
from perdure.comparison.references import plan_references
from perdure.comparison.variants import read_methods, read_seeds, read_sweep
from perdure.config import override, read_yaml
from perdure.core.errors import RunError
from perdure.recipes import find_config
from perdure.report.table_style import TableStyle, read_metrics

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
    for table in comparison_tables(outcome.comparison, outcome.style):
        console.print(table)
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
