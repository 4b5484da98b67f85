"""perdure demo: the methods side by side on real data that comes along, in a few minutes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from perdure.cli.compare import complain_of_failures
from perdure.cli.comparison_tables import comparison_tables
from perdure.cli.comparison_view import viewing
from perdure.cli.configs import Quiet
from perdure.cli.messages import listen, results
from perdure.cli.stops import Stopped, shown
from perdure.cli.tables import definitions_table, matrix_table
from perdure.comparison.compare import Outcome, run_plan
from perdure.comparison.plan import PlannedRun
from perdure.config import parse
from perdure.report import Runs, read_runs, write_page

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

MODE = "task_agnostic"
USUAL_OUT = Path("runs/demo")


def demo(
    out: Annotated[
        Path, typer.Option(help="Where the runs and the report go.", metavar="DIR")
    ] = USUAL_OUT,
    quiet: Quiet = False,
) -> None:
    """Compare the methods on permuted digits, print what came out and write the report.

    The same command goes on after a stop.
    """
    listen(quiet=True)
    command = ["perdure", "demo", "--out", str(out)]
    try:
        with viewing(quiet) as view:
            outcome = run_plan(plan(), out, view=view)
    except KeyboardInterrupt:
        raise Stopped(f"every finished round is kept; go on with: {shown(command)}") from None
    if outcome.comparison is not None:
        show(outcome, read_runs([out]), quiet)
    complain_of_failures(outcome, command)


def plan() -> list[PlannedRun]:
    """One run a method, alike in everything else."""
    return [PlannedRun(each["kind"], parse(SETTING | {"method": each})) for each in METHODS]


def show(outcome: Outcome, runs: Runs, quiet: bool) -> None:
    """The matrices, the metrics, what they mean, and the page that has it all."""
    assert outcome.comparison is not None
    page, console = outcome.out / "report.html", results()
    if not quiet:
        for name, group in runs.groups.items():
            title = f"{name}: {MODE} accuracy on each task after each task"
            console.print(matrix_table(title, group[0].result["matrix"][MODE]))
    for table in comparison_tables(outcome.comparison):
        console.print(table)
    if not quiet:
        console.print(definitions_table())
    write_page(runs, page)
    console.print(f"with figures: {page}", soft_wrap=True)
