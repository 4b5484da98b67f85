"""R2, the coefficient of determination."""

from __future__ import annotations

from perdure.contract.metrics.metric import Metric
from perdure.contract.score_counts import ScoreCounts, r2_of


class R2(Metric):
    """R2 of predicted numbers: 1 is perfect, 0 as good as always the mean, and less is worse."""

    needs = ("errors",)

    def value(self, counts: ScoreCounts) -> float | None:
        """Return 1 - (sum of squared errors) / (sum of squared deviations from the mean)."""
        return r2_of(counts.errors) if float(counts.errors[0]) else None
