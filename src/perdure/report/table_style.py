"""Which measures a table shows, in which order and in which unit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from perdure.core.errors import bad_value
from perdure.core.spelling import argument
from perdure.report.comparison import Comparison
from perdure.report.measures import COSTS, Measure, ScoreMeasure
from perdure.training.metrics import DEFINITIONS

MAIN_METRICS = ("ACC", "FGT", "learned", "Avg")
"""Metrics that short tables show, beside those of `evaluate.metrics`."""
MAIN_COSTS = ("sent up", "sent down", "up per client", "kept per client", "seconds", "memory")
"""Costs that short tables show."""


@dataclass(frozen=True)
class TableStyle:
    """Which measures the tables of a comparison show, and in which unit."""

    metrics: tuple[str, ...] = ()
    """Names of metrics and costs, in their order. If empty, each table has a default."""
    percent: bool = False
    """Whether shares are shown as percentages."""

    def choose(self, measures: Sequence[Measure], default: Sequence[str] = ()) -> list[Measure]:
        """Return the measures to show.

        Args:
            measures: Those that there are.
            default: Names to show if no metrics are chosen. If empty, all.
        """
        names = self.metrics or tuple(default)
        if not names:
            return list(measures)
        shown = [measure for measure in measures if measure.name in names]
        return sorted(shown, key=lambda measure: names.index(measure.name))


def main_names(comparison: Comparison, mode: str | None) -> tuple[str, ...]:
    """Return the names of the measures that short tables show of an inference mode, or of costs."""
    if mode is None:
        return MAIN_COSTS
    scores = [m.metric for m in comparison.measures if isinstance(m, ScoreMeasure)]
    return (*MAIN_METRICS, *dict.fromkeys(scores))


def read_metrics(text: str) -> tuple[str, ...]:
    """Read names separated by commas, such as `ACC,FGT`."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def check_metrics(metrics: Sequence[str], measured: Iterable[str]) -> None:
    """Refuse names that no table has, before anything is run.

    Args:
        metrics: Names of metrics and costs.
        measured: Metrics of `evaluate.metrics`.
    """
    scores = [name for metric in measured for name in (metric, f"{metric} FGT")]
    known = [*DEFINITIONS, *scores, *(cost.name for cost in COSTS)]
    unknown = next((name for name in metrics if name not in known), None)
    if unknown is not None:
        raise bad_value(argument("metrics"), unknown, f"one of {', '.join(known)}")
