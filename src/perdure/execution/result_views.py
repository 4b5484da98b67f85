"""A result in a notebook: one line, a table as HTML, and a data frame."""

from __future__ import annotations

from typing import Any

from perdure.core.notebook import html_table
from perdure.core.optional import require

_SHOWN = ("ACC", "FGT", "learned", "Avg")
Values = dict[str, Any]
"""The content of result.json."""


def result_line(values: Values, path: object) -> str:
    """Return what a result is and its main numbers, in one line."""
    mode = "routed" if values["metrics"]["routed"] else "task_agnostic"
    metrics = values["metrics"][mode]
    numbers = " ".join(f"{name} {_number(metrics[name])}" for name in ("ACC", "FGT"))
    where = f", {path}" if path is not None else ""
    tasks = f"{values['tasks']} task{'s' if values['tasks'] != 1 else ''}"
    return f"{values['method']}, seed {values['seed']}, {tasks}, {mode} {numbers}{where}"


def result_html(values: Values, path: object) -> str:
    """Return a table of the main metrics by inference mode."""
    scores = values["scores"] or {}
    main = values["measure"]
    others = [name for name in scores if name != main]
    rows = [
        [mode, *(_number(metrics[name]) for name in _SHOWN),
         *(_number(_last_mean(scores[name][mode])) for name in others)]
        for mode, metrics in values["metrics"].items() if metrics
    ]  # fmt: skip
    return html_table(result_line(values, path), ["", *_SHOWN, *others], rows)


def result_frame(values: Values) -> Any:
    """Return the matrices as a data frame with one row per mode, task trained and task tested."""
    pandas = require("pandas", "to_frame", "notebook")
    scores = values["scores"] or {}
    matrices = {values["measure"]: values["matrix"], **scores}
    rows = [
        {"mode": mode, "after": i, "task": j,
         **{name: by_mode[mode][i][j] for name, by_mode in matrices.items()}}
        for mode, matrix in values["matrix"].items() if matrix
        for i in range(len(matrix)) for j in range(i + 1)
    ]  # fmt: skip
    return pandas.DataFrame(rows, columns=["mode", "after", "task", *matrices])


def _last_mean(matrix: list[list[float | None]]) -> float | None:
    known = [value for value in matrix[-1] if value is not None]
    return sum(known) / len(known) if len(known) == len(matrix[-1]) else None


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
