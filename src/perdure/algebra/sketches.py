"""Gaussian sketches: random mixtures of columns whose principal directions are the columns' own."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def gaussian_sketch(columns: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """X G with G ~ N(0, 1) of shape n x size: E[(X G)(X G)^T] = size * X X^T.

    Its law depends on X X^T alone, so any R with R R^T = X X^T may stand for X.
    """
    mixing = torch.randn(columns.shape[1], size, generator=generator)
    sketch: Tensor = columns @ mixing.to(columns)
    return sketch


def clip_norm(matrix: Tensor, limit: float) -> Tensor:
    """The matrix, scaled down to a Frobenius norm of at most `limit`."""
    norm = torch.linalg.vector_norm(matrix)
    factor: Tensor = (limit / norm.clamp(min=1e-30)).clamp(max=1.0)
    return matrix * factor


def paper_sigma(epsilon: float, delta: float, clients: int) -> float:
    """Noise of one client by FOT's appendix H: sigma^2 = log(1.25 / delta) / (epsilon^2 C)."""
    return math.sqrt(math.log(1.25 / delta) / clients) / epsilon


def standard_sigma(epsilon: float, delta: float, clients: int, sensitivity: float) -> float:
    """Noise of one client so that the sum of C has that of the Gaussian mechanism.

    sigma_sum = sensitivity * sqrt(2 log(1.25 / delta)) / epsilon (Dwork and Roth 2014, theorem A.1,
    proved for epsilon < 1), divided by sqrt(C) because independent noises add up in variance.
    """
    return sensitivity * math.sqrt(2 * math.log(1.25 / delta) / clients) / epsilon
