"""Metrics of accuracy and forgetting.

"Forgetting" means several formulas in this field, so DEFINITIONS gives every metric a name, a
formula and a paper.
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
    "learned": "mean accuracy on each task right after learning it: 1/T sum_j a[j][j]",
    "worst_drop": "largest drop of an earlier task from its accuracy right after learning "
    "(SPECIAL): max_{j<T} (a[j][j] - a[T][j])",
    "AF": "forgetting from the best earlier accuracy, divided by T-1 (STAMP): "
    "1/(T-1) sum_{j<T} (max_{j<=i<T} a[i][j] - a[T][j])",
    "BWT": "backward transfer, which is -FGT (SPECIAL): 1/(T-1) sum_{j<T} (a[T][j] - a[j][j])",
    "Avg": "mean over time of the mean accuracy so far (PIP): "
    "1/T sum_t A_t with A_t = 1/t sum_{j<=t} a[t][j]",
    "PD": "performance drop from the first task to the last (PIP): A_1 - A_T",
    "F": "forgetting after each task, averaged over time (PIP): 1/(T-1) sum_{t=2..T} F_t "
    "with F_t = 1/(t-1) sum_{j<t} (max_{j<=i<t} a[i][j] - a[t][j])",
}
"""The definition of each metric. Tasks count from 1; a[i][j]: accuracy on task j after task i."""


LEVELS = ("ACC", "Avg", "learned")
"""Metrics that are means of accuracies; the others are differences of them."""


def metrics(
    matrix: Sequence[Sequence[float | None]], lower_is_better: bool = False
) -> dict[str, float | None]:
    """Return every metric of DEFINITIONS over the tasks so far.

    Example:
        >>> metrics([[1.0, None], [0.5, 0.75]])["FGT"]
        0.5
    """
    rows = learned_rows(matrix)
    if not rows:
        return dict.fromkeys(DEFINITIONS)
    if lower_is_better:
        values = metrics([[-value for value in row] for row in rows])
        return values | {name: -(values[name] or 0.0) for name in LEVELS}
    mean_accuracies = [_mean(row) for row in rows]
    values = dict.fromkeys(DEFINITIONS)
    values |= {"ACC": mean_accuracies[-1], "Avg": _mean(mean_accuracies)}
    values["learned"] = _mean([row[-1] for row in rows])
    if len(rows) > 1:
        values |= _forgetting(rows) | {"PD": mean_accuracies[0] - mean_accuracies[-1]}
    return values


def forgetting_by_task(matrix: Sequence[Sequence[float | None]]) -> list[float | None]:
    """Return F_t of DEFINITIONS after each task (PIP's Table 4); None after the first.

    Example:
        >>> forgetting_by_task([[1.0, None], [0.5, 0.75]])
        [None, 0.5]
    """
    rows = learned_rows(matrix)
    return [_mean(drops_from_best(rows, t)) if t else None for t in range(len(rows))]


def learned_rows(matrix: Sequence[Sequence[float | None]]) -> list[list[float]]:
    """Return the rows of a matrix without the entries of tasks that were not learned yet.

    Raises:
        ValueError: The accuracy of a task that was learned is missing.

    """
    rows = []
    for i, row in enumerate(matrix):
        values = [value for value in row[: i + 1] if value is not None]
        if len(values) != i + 1:
            got = f"got {list(row)}"
            raise ValueError(f"row {i} of an accuracy matrix needs {i + 1} numbers, {got}")
        rows.append(values)
    return rows


def _forgetting(rows: list[list[float]]) -> dict[str, float | None]:
    last = len(rows) - 1
    from_best = drops_from_best(rows, last)
    drops = [rows[j][j] - rows[last][j] for j in range(last)]
    from_first = _mean(drops)
    return {
        "FT": sum(from_best) / len(rows),
        "FGT": from_first,
        "worst_drop": max(drops),
        "AF": _mean(from_best),
        "BWT": -from_first,
        "F": _mean([_mean(drops_from_best(rows, t)) for t in range(1, len(rows))]),
    }


def drops_from_best(rows: list[list[float]], now: int) -> list[float]:
    """Return how far each earlier task's accuracy after task `now` is below its previous best."""
    return [max(row[j] for row in rows[j:now]) - rows[now][j] for j in range(now)]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
