"""The accuracy of the worst client."""

from __future__ import annotations

from perdure.contract.metrics.metric import Metric
from perdure.contract.score_counts import ScoreCounts


class WorstClient(Metric):
    """Lowest accuracy (R2 of numbers) of a client with local test data or its own model."""

    needs = ("correct",)

    def value(self, counts: ScoreCounts) -> float | None:
        """Return the lowest accuracy, or None if there are no such clients."""
        values = [client.accuracy for client in counts.clients]
        return min((value for value in values if value is not None), default=None)
