"""Gaussian sketches: random mixtures of columns that keep the columns' principal directions."""

from __future__ import annotations

import torch
from torch import Tensor


def gaussian_sketch(columns: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """Return X G with G ~ N(0, 1) of shape n x size: E[(X G)(X G)^T] = size * X X^T.

    Its distribution depends on X X^T alone, so any R with R R^T = X X^T can replace X.

    Args:
        columns: The matrix X, float [d, n].
        size: Number of columns of the sketch.
        generator: CPU generator that G is drawn from.

    Returns:
        The sketch, float [d, size].
    """
    mixing = torch.randn(columns.shape[1], size, generator=generator)
    sketch: Tensor = columns @ mixing.to(columns)
    return sketch
