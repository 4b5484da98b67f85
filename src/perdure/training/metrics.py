"""Accuracy and forgetting of a run, each number with the definition it was computed by.

The word "forgetting" stands for several formulas in this field, so every metric here carries its
own name, formula and paper (DEFINITIONS).
"""

from __future__ import annotations

from collections.abc import Sequence

Matrix = list[list[float | None]]
"""matrix[i][j]: accuracy (0 to 1) on task j after task i, both from 0; None for j > i."""

DEFINITIONS: dict[str, str] = {
    "ACC": "mean accuracy over all tasks after the last: 1/T sum_j a[T][j]",
    "FT": "forgetting from the best earlier accuracy, divided by T (FedProTIP): "
    "1/T sum_{j<T} (max_{j<=i<T} a[i][j] - a[T][j])",
    "FGT": "forgetting from the accuracy right after learning (FOT): "
    "1/(T-1) sum_{j<T} (a[j][j] - a[T][j])",
    "AF": "forgetting from the best earlier accuracy, divided by T-1 (STAMP): "
    "1/(T-1) sum_{j<T} (max_{j<=i<T} a[i][j] - a[T][j])",
    "BWT": "backward transfer, which is -FGT (SPECIAL): 1/(T-1) sum_{j<T} (a[T][j] - a[j][j])",
    "Avg": "mean over time of the mean accuracy so far (PIP): "
    "1/T sum_t A_t with A_t = 1/t sum_{j<=t} a[t][j]",
    "PD": "performance drop from the first task to the last (PIP): A_1 - A_T",
    "F": "forgetting after each task, averaged over time (PIP): 1/(T-1) sum_{t=2..T} F_t "
    "with F_t = 1/(t-1) sum_{j<t} (max_{j<=i<t} a[i][j] - a[t][j])",
}
"""What each metric means (tasks counted from 1, a[i][j]: accuracy on task j after task i)."""


def metrics(matrix: Sequence[Sequence[float | None]]) -> dict[str, float | None]:
    """Every metric of DEFINITIONS, over the tasks that were learned so far (the rows there are).

    Metrics that compare two moments are None after one task, and all are None before the first.

    >>> metrics([[1.0, None], [0.5, 0.75]])["FGT"]
    0.5
    """
    rows = [_learned(row, i) for i, row in enumerate(matrix)]
    if not rows:
        return dict.fromkeys(DEFINITIONS)
    accuracies_so_far = [_mean(row) for row in rows]
    found: dict[str, float | None] = dict.fromkeys(DEFINITIONS)
    found |= {"ACC": accuracies_so_far[-1], "Avg": _mean(accuracies_so_far)}
    if len(rows) > 1:
        found |= _comparisons(rows) | {"PD": accuracies_so_far[0] - accuracies_so_far[-1]}
    return found


def _learned(row: Sequence[float | None], i: int) -> list[float]:
    values = [value for value in row[: i + 1] if value is not None]
    if len(values) != i + 1:
        raise ValueError(f"row {i} of an accuracy matrix needs {i + 1} numbers, got {list(row)}")
    return values


def _comparisons(rows: list[list[float]]) -> dict[str, float | None]:
    last = len(rows) - 1
    from_best = drops_from_best(rows, last)
    from_first = _mean([rows[j][j] - rows[last][j] for j in range(last)])
    return {
        "FT": sum(from_best) / len(rows),
        "FGT": from_first,
        "AF": _mean(from_best),
        "BWT": -from_first,
        "F": _mean([_mean(drops_from_best(rows, t)) for t in range(1, len(rows))]),
    }


def drops_from_best(rows: list[list[float]], now: int) -> list[float]:
    """How far each earlier task's accuracy lies below the best that it had before `now`."""
    return [max(row[j] for row in rows[j:now]) - rows[now][j] for j in range(now)]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
