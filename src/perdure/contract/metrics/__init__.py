"""Metrics of predictions by name; one file each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from perdure.contract.metrics.metric import Metric
from perdure.contract.score_counts import CLASS_COUNTS, COUNT_NAMES, NUMBER_COUNTS
from perdure.core.errors import bad_value
from perdure.core.registry import Registry

METRICS: Registry[Metric] = Registry(
    key="evaluate.metrics",
    base=Metric,
    base_name="perdure.Metric",
    group="perdure.metrics",
    builtin={
        "accuracy": "perdure.contract.metrics.accuracy.Accuracy",
        "macro_f1": "perdure.contract.metrics.macro_f1.MacroF1",
        "auroc": "perdure.contract.metrics.auroc.Auroc",
        "sensitivity": "perdure.contract.metrics.sensitivity.Sensitivity",
        "specificity": "perdure.contract.metrics.specificity.Specificity",
        "ece": "perdure.contract.metrics.ece.Ece",
        "worst_client": "perdure.contract.metrics.worst_client.WorstClient",
        "r2": "perdure.contract.metrics.r2.R2",
        "mae": "perdure.contract.metrics.mae.Mae",
    },
)
Target = Literal["class", "number"]
"""What is predicted: `data.target`."""
_DEFAULTS: dict[Target, tuple[str, ...]] = {"class": ("accuracy",), "number": ("r2", "mae")}
_COUNTS_OF: dict[Target, tuple[str, ...]] = {"class": CLASS_COUNTS, "number": NUMBER_COUNTS}
MAIN: dict[Target, str] = {"class": "accuracy", "number": "r2"}
"""The metric whose matrix every run has (`matrix` in result.json)."""


def make_metrics(
    names: Sequence[str] | None, target: Target = "class", by_client: bool = False,
    folder: Path | None = None,
) -> dict[str, Metric]:  # fmt: skip
    """Return the metrics that a config names; none for accuracy alone, which every run has.

    Args:
        names: `evaluate.metrics`. If None, accuracy, or R2 and the mean absolute error of numbers.
        target: `data.target`.
        by_client: Whether clients are scored, so that metrics are made for accuracy alone, too.
        folder: Where modules of a dotted path are looked up before the working folder.

    Raises:
        UserError: There is no such metric, or it needs a count that does not exist.
    """
    chosen = list(names or _DEFAULTS[target])
    if chosen == ["accuracy"] and target == "class" and not by_client:
        return {}
    return {name: _make(name, target, folder) for name in chosen}


def _make(name: str, target: Target, folder: Path | None) -> Metric:
    metric = METRICS.find(name, folder)()
    unknown = [need for need in metric.needs if need not in COUNT_NAMES]
    if unknown:
        raise bad_value(f"{name}.needs", unknown[0], ", ".join(COUNT_NAMES))
    if not _suits(metric, target):
        suitable = ", ".join(n for n in METRICS.builtin if _suits(METRICS.find(n), target))
        raise bad_value("evaluate.metrics", name, f"{suitable} with data.target {target!r}")
    return metric


def _suits(metric: Metric | type[Metric], target: Target) -> bool:
    return set(metric.needs) <= set(_COUNTS_OF[target])


def meaning(name: str) -> str:
    """Return the definition of a built-in metric; of others only that they are a user's."""
    return definition(METRICS.find(name)) if METRICS.is_builtin(name) else f"the metric {name}"


def definition(metric: Metric | type[Metric]) -> str:
    """Return the first line of a metric's docstring, as part of a sentence."""
    first = (metric.__doc__ or "").partition("\n")[0].rstrip(".")
    return first if first[1:2].isupper() or first[1:2].isdigit() else first[:1].lower() + first[1:]
