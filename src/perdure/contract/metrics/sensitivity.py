"""Sensitivity, which is recall."""

from __future__ import annotations

import torch

from perdure.contract.metrics.metric import Metric
from perdure.contract.score_counts import ScoreCounts


class Sensitivity(Metric):
    """Recall: of the second class if there are two in total, else the mean over classes."""

    def value(self, counts: ScoreCounts) -> float | None:
        """Return TP / (TP + FN)."""
        examples = counts.confusion.sum(1)
        recall = counts.confusion.diagonal() / examples
        chosen = examples > 0
        if counts.is_binary:
            chosen = chosen & (torch.tensor(counts.classes) == 1)
        return float(recall[chosen].mean()) if chosen.any() else None
