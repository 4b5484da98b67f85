"""perdure demo: compare methods on a bundled data set in a few minutes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from perdure.cli.compare import (
    comparison_tables,
    document,
    print_notes,
    raise_failures,
    show_run_progress,
)
from perdure.cli.console import (
    facts_table,
    matrix_table,
    print_json,
    setup_logging,
    stdout_console,
    stoppable,
)
from perdure.cli.options import Json, Quiet
from perdure.config import override_key, parse
from perdure.core.errors import UserError
from perdure.evaluation.forgetting import DEFINITIONS
from perdure.report import Runs, write_page
from perdure.runs.compare.compare import Outcome, run_plan
from perdure.runs.compare.plan import PlannedRun, plan
from perdure.runs.compare.variants import MethodChoice
from perdure.runs.records import read_runs

# ---- What perdure demo compares: three streams of digits, methods on them, and references
#
# A label names a method; with `-paper` it is the letter of its paper where the default differs,
# with `-calibrated` the head is refitted from class Gaussians at each task's end.

Values = dict[str, Any]


@dataclass(frozen=True)
class DemoRun:
    """A method of the demo."""

    method: Values
    """The `method` section."""
    settings: Values = field(default_factory=dict)
    """Values of other config keys in which it differs from the rest of its part."""

    def planned(self, label: str, setting: Values) -> PlannedRun:
        """Return the run, given what all methods of the part share."""
        values = setting | {"method": self.method}
        for key, value in self.settings.items():
            values = override_key(values, key, value)
        return PlannedRun(label, parse(values))


@dataclass(frozen=True)
class DemoPart:
    """Methods and references on one stream, equal in everything else."""

    name: str
    """Name of its folder."""
    setting: Values
    """What all methods share."""
    methods: Mapping[str, DemoRun]
    """Methods by label; the first is the one that the others are compared with."""
    references: tuple[MethodChoice, ...]
    """What the figures are judged by."""

    def runs(self) -> list[PlannedRun]:
        """Return all runs of the part, with seed 0."""
        methods = [run.planned(label, self.setting) for label, run in self.methods.items()]
        return [*methods, *plan(self.setting, self.references, [0])]


CLIENTS = {"count": 10, "partition": {"kind": "dirichlet", "alpha": 0.5}}
MLP: Values = {
    "data": {"source": "digits"},
    "clients": CLIENTS,
    "model": {"kind": "mlp", "hidden": [100, 100]},
    "train": {"rounds": 10, "local_epochs": 1, "batch_size": 16, "lr": 0.1},
    "engine": {"kind": "vector", "chunk": 10},
}
"""Scikit-learn's digits on ten unequal clients.

The engine is fixed: the choice of auto, and with it rounding, depends on the machine's load.
"""
CALIBRATE = {"with": [{"kind": "calibrate"}]}
ON_RAW_INPUTS = tuple(
    MethodChoice(kind, {"inputs": "raw"}, f"{kind}-raw") for kind in ("fedncm", "fedlda")
)
TRAINED = (MethodChoice("joint"), MethodChoice("single"))
FOT = {"kind": "fot"}
FEDPROTIP = {"kind": "fedprotip"}
GAUSSIAN = {"router": "gaussian"}
STAMP = {"kind": "stamp"}
SPECIAL = {"kind": "special"}

PERMUTED = DemoPart(
    "permuted",
    MLP | {"stream": {"kind": "permuted", "tasks": 5}},
    {
        "fedavg": DemoRun({"kind": "fedavg"}),
        "fot": DemoRun(FOT),
        "fot-paper": DemoRun(FOT | {"threshold": 0.95, "sketch_ratio": 5.0}),
        "fedprotip": DemoRun(FEDPROTIP),
        "fedprotip-paper": DemoRun({"kind": "fedprotip", "bases": "union", "threshold": 0.6}),
        "stamp": DemoRun(STAMP),
        "stamp-paper": DemoRun(STAMP | {"gradients": "prototype"}),
        "special": DemoRun(SPECIAL),
        "special-paper": DemoRun(SPECIAL, {"train.server_schedule": "1/k"}),
    },
    (*TRAINED, *ON_RAW_INPUTS),
)
"""Five permutations of the pixels: the same classes in every task.

Beside each method is its paper's reading: FOT's threshold, the union of FedProTIP's bases, the loss
of STAMP's mean features (its eq. 3) and the decreasing server step size of SPECIAL.
"""

SPLIT = DemoPart(
    "split",
    MLP
    | {
        "stream": {"kind": "split", "tasks": 5},
        "model": {"kind": "mlp", "hidden": [100, 100], "head": "growing"},
    },
    {
        "fedavg": DemoRun({"kind": "fedavg"}),
        "fedavg-calibrated": DemoRun({"kind": "fedavg"} | CALIBRATE),
        "fot": DemoRun(FOT),
        "fot-calibrated": DemoRun(FOT | CALIBRATE),
        "fedprotip": DemoRun(FEDPROTIP | GAUSSIAN),
        "fedprotip-paper": DemoRun({"kind": "fedprotip", "bases": "union", "threshold": 0.6}),
        "fedprotip-calibrated": DemoRun(FEDPROTIP | GAUSSIAN | CALIBRATE),
        "stamp": DemoRun(STAMP),
        "stamp-calibrated": DemoRun(STAMP | CALIBRATE),
        "special": DemoRun(SPECIAL),
        "special-calibrated": DemoRun(SPECIAL | CALIBRATE),
    },
    (*TRAINED, *ON_RAW_INPUTS),
)
"""Two digits per task: what is lost is lost between tasks, and the head decides.

FedProTIP's routed accuracy shows its router: Gaussians of classes, or the paper's references.
"""

PROMPTS = DemoPart(
    "prompts",
    {
        "data": {"source": "digits"},
        "stream": {"kind": "split", "tasks": 5},
        "clients": CLIENTS,
        "model": {"kind": "vit", "train_layers": 0},
        "train": {
            "rounds": 5, "local_epochs": 2, "batch_size": 16, "lr": 0.02, "optimizer": "adam",
            "clip": 1.0,
        },
        "engine": {"kind": "serial"},
    },
    {
        "fedavg": DemoRun({"kind": "fedavg"}),
        "fed-dualp": DemoRun({"kind": "fed-dualp"}, {"model.train_layers": None}),
        "pip": DemoRun({"kind": "pip"}, {"model.train_layers": None}),
        "pip-calibrated": DemoRun({"kind": "pip"} | CALIBRATE, {"model.train_layers": None}),
    },
    tuple(MethodChoice(kind) for kind in ("fedncm", "fedlda")),
)  # fmt: skip
"""Two digits per task, for methods that learn prompts of the bundled pretrained transformer.

FedAvg trains the head alone. The references are heads in closed form on the frozen features.
"""

PARTS = (PERMUTED, SPLIT, PROMPTS)
"""The parts of the demo. Figures of different parts are not comparable."""


# ---- perdure demo: compare methods on a bundled data set in a few minutes

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
    for part in PARTS:
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


def definitions_table() -> Table:
    """Return the table of all metrics and their definitions."""
    return facts_table(DEFINITIONS.items())
