"""Accuracy."""

from __future__ import annotations

from perdure.contract.metrics.metric import Metric
from perdure.contract.score_counts import ScoreCounts


class Accuracy(Metric):
    """Fraction of correct predictions."""

    def value(self, counts: ScoreCounts) -> float | None:
        """Return the accuracy."""
        total = float(counts.confusion.sum())
        return float(counts.confusion.diagonal().sum()) / total if total else None
