"""perdure compare: methods, settings and seeds side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from perdure.cli.arguments import File, Quiet, Settings, method_dir
from perdure.cli.comparison_progress import viewing
from perdure.cli.comparison_tables import comparison_tables
from perdure.cli.console import setup_logging, stdout_console
from perdure.cli.interrupts import Stopped, shell_command
from perdure.comparison.compare import Outcome, run_plan
from perdure.comparison.plan import plan
from perdure.comparison.variants import read_methods, read_seeds, read_sweep
from perdure.config import override, read_yaml
from perdure.core.errors import RunError
from perdure.report.comparison_text import NOTE

Jobs = Annotated[
    int | None, typer.Option(min=1, help="Runs at a time; usually one a core.", metavar="N")
]


def compare(
    file: File,
    methods: Annotated[
        str,
        typer.Option(
            help="Kinds with commas between, keys after colons: fedavg,fot:threshold=0.9.",
            metavar="A,B,C",
        ),
    ],
    out: Annotated[Path, typer.Option(help="The comparison's folder.", metavar="DIR")],
    seeds: Annotated[str, typer.Option(help="Such as 0,1,2 or 0-4.")] = "0,1,2",
    settings: Settings = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(help="A key and the values that it takes.", metavar="KEY=V,V"),
    ] = None,
    jobs: Jobs = None,
    quiet: Quiet = False,
) -> None:
    """Run every method with every seed and print mean, spread and differences.

    The same command goes on after a stop and adds what is new; finished runs are not repeated.
    """
    setup_logging(quiet=True)  # every run has its own log
    sweeps = [read_sweep(text) for text in sweep or []]
    values = override(read_yaml(file), settings or [])
    command = rerun_command(file, methods, out, seeds, settings, sweep, jobs)
    with method_dir(file):
        planned = plan(values, read_methods(methods), read_seeds(seeds), sweeps)
        try:
            with viewing(quiet) as view:
                outcome = run_plan(planned, out, jobs, view, file.parent)
        except KeyboardInterrupt:
            raise Stopped(
                f"every finished round is kept; go on with: {shell_command(command)}"
            ) from None
    show(outcome)
    complain_of_failures(outcome, command)


def rerun_command(
    file: Path,
    methods: str,
    out: Path,
    seeds: str,
    settings: list[str] | None,
    sweep: list[str] | None,
    jobs: int | None,
) -> list[str]:
    """The command that goes on with a comparison, which is the same command."""
    changes = [part for text in settings or [] for part in ("--set", text)]
    swept = [part for text in sweep or [] for part in ("--sweep", text)]
    at_a_time = ["--jobs", str(jobs)] if jobs is not None else []
    return [
        "perdure", "compare", str(file), "--methods", methods, "--seeds", seeds,
        *changes, *swept, "--out", str(out), *at_a_time,
    ]  # fmt: skip


def show(outcome: Outcome) -> None:
    """The tables on the screen, and where the rest is."""
    if outcome.comparison is None:
        return
    console = stdout_console()
    for table in comparison_tables(outcome.comparison):
        console.print(table)
    console.print(NOTE)
    page = shell_command(["perdure", "report", str(outcome.out), "--html", "report.html"])
    console.print(f"all metrics: table.md, table.csv and table.tex in {outcome.out}")
    console.print(f"with figures: {page}")


def complain_of_failures(outcome: Outcome, command: list[str]) -> None:
    """A run that failed is an error of the whole, after everything else was done."""
    if outcome.failures:
        named = "; ".join(f"{each.run.name} ({each.reason})" for each in outcome.failures)
        count = len(outcome.failures)
        raise RunError(f"{count} failed: {named}; go on with: {shell_command(command)}")
