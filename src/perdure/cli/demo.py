"""perdure demo: the methods side by side on real data that comes along, in a few minutes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from perdure.cli.arguments import Quiet
from perdure.cli.compare import complain_of_failures
from perdure.cli.comparison_progress import viewing
from perdure.cli.comparison_tables import comparison_tables
from perdure.cli.console import setup_logging, stdout_console
from perdure.cli.interrupts import Stopped, shell_command
from perdure.cli.tables import definitions_table, matrix_table
from perdure.comparison.compare import Outcome, run_plan
from perdure.comparison.plan import PlannedRun
from perdure.config import parse
from perdure.core.errors import UserError
from perdure.report import Runs, read_runs, write_page
from perdure.report.comparison_text import NOTE

SETTING: dict[str, Any] = {
    "data": {"source": "digits"},
    "stream": {"kind": "permuted", "tasks": 5},
    "clients": {"count": 10, "partition": {"kind": "dirichlet", "alpha": 0.5}},
    "model": {"kind": "mlp", "hidden": [100, 100]},
    "train": {"rounds": 10, "local_epochs": 1, "batch_size": 16, "lr": 0.1},
    "engine": {"kind": "vector", "chunk": 10},
}
"""Five orders of the pixels of scikit-learn's digits, over ten unequal clients.

The engine is fixed: auto's choice depends on the machine's load, and with it the last digits.
"""

METHODS: tuple[dict[str, Any], ...] = (
    {"kind": "fedavg"},
    {"kind": "fot", "threshold": 0.95},
    {"kind": "fedprotip", "threshold": 0.6},
    {"kind": "stamp", "diagnostics": True},
    {"kind": "special", "lambda": 0.1, "schedule": "constant"},
)
"""FedAvg, which forgets, and the methods with the settings of their recipes on this data."""

SPLIT: dict[str, Any] = {
    "data": {"source": "digits"},
    "stream": {"kind": "split", "tasks": 5},
    "clients": {"count": 10, "partition": {"kind": "dirichlet", "alpha": 0.5}},
    "model": {"kind": "vit"},
    "train": {
        "rounds": 5, "local_epochs": 2, "batch_size": 16, "lr": 0.02, "optimizer": "adam",
        "clip": 1.0,
    },
    "engine": {"kind": "serial"},
}  # fmt: skip
"""Two digits a task, for methods that learn prompts of the pretrained transformer that comes along;
trained as in their recipes.

Another stream and another model: its figures are not to be compared with the others.
"""

PROMPTED: tuple[dict[str, Any], ...] = ({"kind": "fed-dualp"}, {"kind": "pip"})
"""PIP, and what it builds on."""

MODE = "task_agnostic"
USUAL_OUT = Path("runs/demo")


def demo(
    out: Annotated[
        Path, typer.Option(help="Where the runs and the report go.", metavar="DIR")
    ] = USUAL_OUT,
    quiet: Quiet = False,
) -> None:
    """Compare methods on permuted and on split digits, print what came out and write the reports.

    The same command goes on after a stop.
    """
    setup_logging(quiet=True)
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out}: must be a directory, got a file")
    for name, planned in (("permuted", plan()), ("split", prompted())):
        part(planned, out / name, ["perdure", "demo", "--out", str(out)], quiet)
    if not quiet:
        stdout_console().print(definitions_table())


def part(planned: list[PlannedRun], out: Path, command: list[str], quiet: bool) -> None:
    """One comparison of the demo."""
    try:
        with viewing(quiet) as view:
            outcome = run_plan(planned, out, view=view)
    except KeyboardInterrupt:
        raise Stopped(
            f"every finished round is kept; go on with: {shell_command(command)}"
        ) from None
    if outcome.comparison is not None:
        show(outcome, read_runs([out]), quiet)
    complain_of_failures(outcome, command)


def plan() -> list[PlannedRun]:
    """One run a method on permuted digits, alike in everything else."""
    return [PlannedRun(each["kind"], parse(SETTING | {"method": each})) for each in METHODS]


def prompted() -> list[PlannedRun]:
    """One run a prompt method on split digits, alike in everything else."""
    return [PlannedRun(each["kind"], parse(SPLIT | {"method": each})) for each in PROMPTED]


def show(outcome: Outcome, runs: Runs, quiet: bool) -> None:
    """The matrices, the metrics and the page that has it all."""
    assert outcome.comparison is not None
    page, console = outcome.out / "report.html", stdout_console()
    if not quiet:
        for name, group in runs.groups.items():
            title = f"{name}: {MODE} accuracy on each task after each task"
            console.print(matrix_table(title, group[0].result["matrix"][MODE]))
    for table in comparison_tables(outcome.comparison):
        console.print(table)
    console.print(NOTE)
    write_page(runs, page)
    console.print(f"with figures: {page}", soft_wrap=True)
