"""Results as tables and lines for people; every number is named by its definition."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

from perdure.config import Config
from perdure.execution.result import Result
from perdure.training.metrics import DEFINITIONS

Row = Sequence[float | None]


def table(title: str, columns: Sequence[str]) -> Table:
    """An empty table: the first column is text, the others are numbers."""
    made = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")
    for place, column in enumerate(columns):
        made.add_column(column, justify="right" if place else "left", no_wrap=True)
    return made


def number(value: float | None) -> str:
    """An accuracy, or a dash where there is none."""
    return "-" if value is None else f"{value:.3f}"


def matrix_table(title: str, matrix: Sequence[Row]) -> Table:
    """Accuracy on each task (columns) after each task (rows)."""
    made = table(title, ["after", *(f"task {j + 1}" for j in range(len(matrix)))])
    for i, row in enumerate(matrix):
        made.add_row(f"task {i + 1}", *("" if value is None else number(value) for value in row))
    return made


def definitions_table() -> Table:
    """What each metric means."""
    made = Table(box=None, show_header=False, pad_edge=False)
    made.add_column(no_wrap=True, style="bold")
    made.add_column()
    for name, meaning in DEFINITIONS.items():
        made.add_row(name, meaning)
    return made


def last_line(config: Config, result: Result) -> str:
    """A finished run in one line."""
    modes = (mode for mode in result.metrics if result.metrics[mode])
    said = "; ".join(f"{mode} {_headline(result.metrics[mode])}" for mode in modes)
    where = f", in {result.path}" if result.path else ""
    method = config.method["kind"]
    return (
        f"{method} on {config.stream.kind} {config.data.source}, seed {config.seed}: {said}{where}"
    )


def _headline(found: dict[str, float | None]) -> str:
    return " ".join(f"{key} {number(found[key])}" for key in ("ACC", "FGT", "Avg"))
