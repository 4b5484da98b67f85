"""Specificity: how many of the others are not taken for a class."""

from __future__ import annotations

import torch

from perdure.contract.metrics.metric import Metric
from perdure.contract.score_counts import ScoreCounts


class Specificity(Metric):
    """Recall of the others: for the second class if there are two in total, else the class mean."""

    def value(self, counts: ScoreCounts) -> float | None:
        """Return TN / (TN + FP)."""
        confusion = counts.confusion
        examples = confusion.sum(1)
        others = examples.sum() - examples
        false_alarms = confusion.sum(0)[:-1] - confusion.diagonal()
        chosen = (others > 0) & (examples > 0)
        if counts.is_binary:
            chosen = (others > 0) & (torch.tensor(counts.classes) == 1)
        return float((1 - false_alarms / others)[chosen].mean()) if chosen.any() else None
