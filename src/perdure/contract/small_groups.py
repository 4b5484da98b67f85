"""Small groups: classes of which a client has too few rows to send anything about them."""

from __future__ import annotations

import torch
from torch import Tensor


def in_large_class(labels: Tensor, min_rows: int) -> Tensor:
    """Return which rows are of a class with at least `min_rows` rows, bool [rows].

    Args:
        labels: int64 [rows]. Class of each row; or numbers, float [rows], which have no classes.
        min_rows: Rows that a class must have.
    """
    if labels.is_floating_point():
        return torch.ones_like(labels, dtype=torch.bool)
    return torch.bincount(labels, minlength=1)[labels] >= min_rows
