"""Metrics of predictions by name; one file each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from perdure.contract.metrics.metric import Metric
from perdure.contract.score_counts import COUNT_NAMES
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
    },
)


def make_metrics(names: Sequence[str], folder: Path | None = None) -> dict[str, Metric]:
    """Return the metrics that a config names; none if it names only accuracy, which every run has.

    Args:
        names: `evaluate.metrics`.
        folder: Where modules of a dotted path are looked up before the working folder.

    Raises:
        UserError: There is no such metric, or it needs a count that does not exist.
    """
    metrics = {} if list(names) == ["accuracy"] else {n: _make(n, folder) for n in names}
    return metrics


def _make(name: str, folder: Path | None) -> Metric:
    metric = METRICS.find(name, folder)()
    unknown = [need for need in metric.needs if need not in COUNT_NAMES]
    if unknown:
        raise bad_value(f"{name}.needs", unknown[0], ", ".join(COUNT_NAMES))
    return metric


def meaning(name: str) -> str:
    """Return the definition of a built-in metric; of others only that they are a user's."""
    if not METRICS.is_builtin(name):
        return f"the metric {name}"
    return (METRICS.find(name).__doc__ or "").partition("\n")[0].rstrip(".").lower()
