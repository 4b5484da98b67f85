"""The base class of a metric of predictions."""

from __future__ import annotations

from typing import ClassVar

from perdure.contract.score_counts import ScoreCounts


class Metric:
    """A number for the predictions on one task's test data, computed from counts.

    A subclass says which counts it needs. Its docstring's first line is shown as its definition.
    """

    needs: ClassVar[tuple[str, ...]] = ("confusion",)
    """Counts that it is computed from: `confusion`, `histograms`, `calibration` (classes), `errors`
    (numbers) or `correct` (both)."""
    lower_is_better: ClassVar[bool] = False
    """Whether it is an error, so that forgetting raises it."""

    def value(self, counts: ScoreCounts) -> float | None:
        """Return the metric, or None if it is not defined for these counts.

        Args:
            counts: Sums over the test examples of one task.
        """
        raise NotImplementedError
