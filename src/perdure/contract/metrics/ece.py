"""The expected calibration error."""

from __future__ import annotations

from perdure.contract.metrics.metric import Metric
from perdure.contract.score_counts import ScoreCounts


class Ece(Metric):
    """Expected calibration error, the mean gap of confidence and accuracy in 15 bins."""

    needs = ("calibration",)
    lower_is_better = True

    def value(self, counts: ScoreCounts) -> float | None:
        """Return sum_b n_b / n |accuracy_b - confidence_b|."""
        examples, correct, confidence = counts.calibration.unbind(1)
        total = float(examples.sum())
        return float((correct - confidence).abs().sum()) / total if total else None
