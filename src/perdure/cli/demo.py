"""perdure demo: every method on real data that comes with the package, in a minute or two."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from perdure.cli.configs import Quiet
from perdure.cli.messages import listen, results
from perdure.cli.progress import watching
from perdure.cli.stops import resumable
from perdure.cli.tables import definitions_table, matrix_table, metrics_table
from perdure.config import Config, parse
from perdure.runs.runner import Result
from perdure.runs.runner import run as run_config

SETTING: dict[str, Any] = {
    "data": {"source": "digits"},
    "stream": {"kind": "permuted", "tasks": 5},
    "clients": {"count": 10, "partition": {"kind": "dirichlet", "alpha": 0.5}},
    "model": {"kind": "mlp", "hidden": [100, 100]},
    "train": {"rounds": 20, "local_epochs": 2, "batch_size": 16, "lr": 0.1},
    "engine": {"kind": "vector", "chunk": 10},
}
"""Five orders of the pixels of scikit-learn's digits, over ten unequal clients.

The engine is fixed: auto's choice depends on the machine's load, and with it the last digits.
"""

METHODS: tuple[dict[str, Any], ...] = (
    {"kind": "fedavg"},
    {"kind": "fedprox", "mu": 0.1},
)

MODE = "task_agnostic"


def demo(
    out: Annotated[Path | None, typer.Option(help="Keep the runs here.", metavar="DIR")] = None,
    quiet: Quiet = False,
) -> None:
    """Compare the methods on permuted digits and print what came out."""
    listen(quiet=True)
    runs: dict[str, Result] = {}
    for config in configs():
        kind = config.method["kind"]
        runs[kind] = one(config, out / kind if out else None, quiet, out)
    show(runs, results(), quiet)


def configs() -> list[Config]:
    """One config a method, alike in everything else."""
    return [parse(SETTING | {"method": method}) for method in METHODS]


def one(config: Config, folder: Path | None, quiet: bool, out: Path | None) -> Result:
    """One method's run. With --out, the same command goes on where it was stopped."""
    begun = folder is not None and (folder / "config.yaml").is_file()
    with (
        one_thread(),
        resumable(folder, ["perdure", "demo", "--out", str(out)]),
        watching(config, quiet, config.method["kind"]) as watch,
    ):
        return run_config(config, out=folder, resume=begun, watch=watch)


@contextmanager
def one_thread() -> Iterator[None]:
    """Nets this small are fastest on one core; sums then do not depend on how many there are."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def show(runs: Mapping[str, Result], console: Console, quiet: bool = False) -> None:
    """The matrices, the metrics and what they mean."""
    if not quiet:
        for kind, result in runs.items():
            title = f"{kind}: {MODE} accuracy on each task after each task"
            console.print(matrix_table(title, result.matrix[MODE]))
    console.print(metrics_table(f"permuted digits, {MODE}", dict(runs), MODE))
    if not quiet:
        console.print(definitions_table())
