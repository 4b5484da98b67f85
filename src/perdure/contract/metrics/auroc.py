"""The area under the ROC curve."""

from __future__ import annotations

from perdure.contract.metrics.metric import Metric
from perdure.contract.score_counts import ScoreCounts


class Auroc(Metric):
    """Area under the ROC curve of each class against the others, the mean over classes."""

    needs = ("histograms",)

    def value(self, counts: ScoreCounts) -> float | None:
        """Return the mean over classes of P(score of an example of the class > of another).

        Examples in one bin count as ties, which are one half.
        """
        others, own = counts.histograms
        below = others.cumsum(1) - others
        pairs = own.sum(1) * others.sum(1)
        areas = (own * (below + others / 2)).sum(1)[pairs > 0] / pairs[pairs > 0]
        return float(areas.mean()) if len(areas) else None
