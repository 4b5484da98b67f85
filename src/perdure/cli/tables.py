"""Results as tables and sentences; every number is named by its definition."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.table import Table

from perdure.config import Config
from perdure.execution.result import Result
from perdure.training.metrics import DEFINITIONS

Row = Sequence[float | None]


def table(title: str, columns: Sequence[str]) -> Table:
    """Return an empty table whose first column is text and whose other columns are numbers."""
    empty = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")
    for index, column in enumerate(columns):
        empty.add_column(column, justify="right" if index else "left", no_wrap=True)
    return empty


def text_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Return a table of text, whose last column is wrapped on a narrow terminal."""
    filled = Table(box=box.SIMPLE_HEAD)
    for index, column in enumerate(columns):
        filled.add_column(column, no_wrap=index < len(columns) - 1, overflow="fold")
    for row in rows:
        filled.add_row(*row)
    return filled


def number(value: float | None) -> str:
    """Return an accuracy as text, or a dash for None."""
    return "-" if value is None else f"{value:.3f}"


def matrix_table(title: str, matrix: Sequence[Row]) -> Table:
    """Return the table of the accuracy on each task (columns) after each task (rows)."""
    filled = table(title, ["after", *(f"task {j + 1}" for j in range(len(matrix)))])
    for i, row in enumerate(matrix):
        filled.add_row(f"task {i + 1}", *("" if value is None else number(value) for value in row))
    return filled


def facts_table(rows: Iterable[tuple[str, str]]) -> Table:
    """Return a table of names in bold and their values, without a header."""
    filled = Table(box=None, show_header=False, pad_edge=False)
    filled.add_column(no_wrap=True, style="bold")
    filled.add_column()
    for name, value in rows:
        filled.add_row(name, value)
    return filled


def definitions_table() -> Table:
    """Return the table of all metrics and their definitions."""
    return facts_table(DEFINITIONS.items())


def result_line(config: Config, result: Result) -> str:
    """Return the result of a run in one line."""
    modes = (mode for mode in result.metrics if result.metrics[mode])
    of_what = "" if result.measure == "accuracy" else f" {result.measure}"
    accuracies = "; ".join(
        f"{mode}{of_what} {_headline(result.metrics[mode])}{_scores(result, mode)}"
        for mode in modes
    )
    where = f", in {result.path}" if result.path else ""
    method = config.method["kind"]
    return (
        f"{method} on {config.stream.kind} {config.data.source}, seed {config.seed}: "
        f"{accuracies}{where}"
    )


def _headline(metrics: dict[str, float | None]) -> str:
    return " ".join(f"{key} {number(metrics[key])}" for key in ("ACC", "FGT", "learned"))


def _scores(result: Result, mode: str) -> str:
    """Return the mean over all tasks after the last of every metric beside the main one."""
    others = {name: scores for name, scores in result.scores.items() if name != result.measure}
    rows = {name: by_mode[mode][-1] for name, by_mode in others.items()}
    return "".join(f" {name} {number(_mean(row))}" for name, row in rows.items())


def _mean(row: Row) -> float | None:
    values = [value for value in row if value is not None]
    return sum(values) / len(row) if len(values) == len(row) else None
