"""The accuracy of the worst client."""

from __future__ import annotations

from perdure.contract.metrics.accuracy import Accuracy
from perdure.contract.metrics.metric import Metric
from perdure.contract.score_counts import ScoreCounts


class WorstClient(Metric):
    """Lowest accuracy over clients with local test data or personal models; else null."""

    def value(self, counts: ScoreCounts) -> float | None:
        """Return the lowest accuracy."""
        values = [Accuracy().value(client) for client in counts.clients]
        return min((value for value in values if value is not None), default=None)
