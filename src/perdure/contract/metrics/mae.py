"""The mean absolute error."""

from __future__ import annotations

from perdure.contract.metrics.metric import Metric
from perdure.contract.score_counts import ScoreCounts


class Mae(Metric):
    """Mean absolute error of predicted numbers, in the unit of the data."""

    needs = ("errors",)
    lower_is_better = True

    def value(self, counts: ScoreCounts) -> float | None:
        """Return sum |error| / n."""
        examples, absolute = counts.errors[:2].tolist()
        return absolute / examples if examples else None
