"""perdure demo: compare methods on a bundled data set in a few minutes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from perdure.cli import demo_parts
from perdure.cli.arguments import Json, Quiet
from perdure.cli.compare import document, raise_failures
from perdure.cli.comparison_progress import show_run_progress
from perdure.cli.comparison_tables import comparison_tables, print_notes
from perdure.cli.console import print_json, setup_logging, stdout_console
from perdure.cli.interrupts import stoppable
from perdure.cli.tables import definitions_table, matrix_table
from perdure.comparison.compare import Outcome, run_plan
from perdure.core.errors import UserError
from perdure.report import Runs, write_page
from perdure.report.run_records import read_runs

MODE = "task_agnostic"
DEFAULT_OUT = Path("runs/demo")


def demo(
    out: Annotated[
        Path, typer.Option(help="The folder of the runs and reports.", metavar="DIR")
    ] = DEFAULT_OUT,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Compare methods on streams of digits with references, print tables and write reports.

    Three parts: permuted digits, split digits, and prompts of a pretrained model on split digits.
    Takes a few minutes. Repeat the command to resume after a stop.
    """
    setup_logging(quiet=True)
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out}: must be a directory, got a file")
    command = ["perdure", "demo", "--out", str(out)]
    outcomes = {}
    for part in demo_parts.PARTS:
        with stoppable(command), show_run_progress(quiet or as_json) as view:
            outcome = outcomes[part.name] = run_plan(part.runs(), out / part.name, view=view)
        _report(outcome, quiet, as_json)
        raise_failures(outcome, command)
    if as_json:
        print_json({name: document(outcome) for name, outcome in outcomes.items()})
    elif not quiet:
        stdout_console().print(definitions_table())


def _report(outcome: Outcome, quiet: bool, as_json: bool) -> None:
    """Write the report of a comparison and print its tables."""
    if outcome.comparison is None:
        return
    runs, page = read_runs([outcome.out]), outcome.out / "report.html"
    write_page(runs, page)
    if as_json:
        return
    console = stdout_console()
    for table in [*([] if quiet else _matrices(runs)), *comparison_tables(outcome.comparison)]:
        console.print(table)
    print_notes(console, outcome.comparison)
    console.print(f"with figures: {page}", soft_wrap=True)


def _matrices(runs: Runs) -> Iterator[Table]:
    for name, group in runs.groups.items():
        title = f"{name}: {MODE} accuracy on each task after each task"
        yield matrix_table(title, group[0].result["matrix"][MODE])
