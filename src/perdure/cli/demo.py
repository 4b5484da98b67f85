"""perdure demo: compare methods on a bundled data set in a few minutes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from perdure.cli.arguments import Json, Quiet
from perdure.cli.compare import document, raise_failures
from perdure.cli.comparison_progress import show_run_progress
from perdure.cli.comparison_tables import comparison_tables, print_notes
from perdure.cli.console import print_json, setup_logging, stdout_console
from perdure.cli.interrupts import stoppable
from perdure.cli.tables import definitions_table, matrix_table
from perdure.comparison.compare import Outcome, run_plan
from perdure.comparison.plan import PlannedRun
from perdure.config import parse
from perdure.core.errors import UserError
from perdure.report import Runs, read_runs, write_page

SETTING: dict[str, Any] = {
    "data": {"source": "digits"},
    "stream": {"kind": "permuted", "tasks": 5},
    "clients": {"count": 10, "partition": {"kind": "dirichlet", "alpha": 0.5}},
    "model": {"kind": "mlp", "hidden": [100, 100]},
    "train": {"rounds": 10, "local_epochs": 1, "batch_size": 16, "lr": 0.1},
    "engine": {"kind": "vector", "chunk": 10},
}
"""Five permutations of the pixels of scikit-learn's digits, on ten unequal clients.

The engine is fixed: the choice of auto, and with it rounding, depends on the machine's load.
"""

METHODS: tuple[dict[str, Any], ...] = (
    {"kind": "fedavg"},
    {"kind": "fot", "threshold": 0.95},
    {"kind": "fedprotip", "threshold": 0.6},
    {"kind": "stamp", "diagnostics": True},
    {"kind": "special", "lambda": 0.1},
)
"""FedAvg, which forgets, and methods with the hyperparameters of their recipes on this data."""

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
"""Two digits per task, for methods that learn prompts of the bundled pretrained transformer.

The stream and the model differ from those above, so the figures are not comparable with them.
"""

PROMPT_METHODS: tuple[dict[str, Any], ...] = ({"kind": "fed-dualp"}, {"kind": "pip"})
"""PIP, and the method that it extends."""

MODE = "task_agnostic"
DEFAULT_OUT = Path("runs/demo")


def demo(
    out: Annotated[
        Path, typer.Option(help="The folder of the runs and reports.", metavar="DIR")
    ] = DEFAULT_OUT,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Compare methods on permuted and on split digits, print the tables and write the reports.

    Takes a few minutes. Repeat the command to resume after a stop.
    """
    setup_logging(quiet=True)
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out}: must be a directory, got a file")
    command = ["perdure", "demo", "--out", str(out)]
    outcomes = {}
    for name, planned in (("permuted", permuted_runs()), ("split", split_runs())):
        with stoppable(command), show_run_progress(quiet or as_json) as view:
            outcomes[name] = run_plan(planned, out / name, view=view)
        _report(outcomes[name], quiet, as_json)
        raise_failures(outcomes[name], command)
    if as_json:
        print_json({name: document(outcome) for name, outcome in outcomes.items()})
    elif not quiet:
        stdout_console().print(definitions_table())


def permuted_runs() -> list[PlannedRun]:
    """Return one run per method on permuted digits, equal in everything else."""
    return [PlannedRun(one["kind"], parse(SETTING | {"method": one})) for one in METHODS]


def split_runs() -> list[PlannedRun]:
    """Return one run per prompt method on split digits, equal in everything else."""
    return [PlannedRun(one["kind"], parse(SPLIT | {"method": one})) for one in PROMPT_METHODS]


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
