"""The F1 score, averaged over classes."""

from __future__ import annotations

from perdure.contract.metrics.metric import Metric
from perdure.contract.score_counts import ScoreCounts


class MacroF1(Metric):
    """F1 score, the mean over the classes that the task's test data has."""

    def value(self, counts: ScoreCounts) -> float | None:
        """Return the mean of 2 TP / (examples of the class + predictions of the class)."""
        correct = counts.confusion.diagonal()
        examples, predicted = counts.confusion.sum(1), counts.confusion.sum(0)[:-1]
        scores = 2 * correct / (examples + predicted)
        scores = scores[examples > 0]
        return float(scores.mean()) if len(scores) else None
