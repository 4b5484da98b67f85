"""Means that a minority of hostile rows cannot move far, and bounds on weights.

The rows of a matrix, float [clients, values], are the clients' updates. All rows count alike: a
weight would be another number with which a client can lie.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_CHUNK = 1 << 14
"""Columns that are sorted at once, so that they fit into a processor's cache."""
_ROUNDING = 1e-9
"""0.29 of 100 rows are 29 of them, though the product is a little less."""


def median(rows: Tensor) -> Tensor:
    """Return the median of each column: of an even number of rows the mean of the middle two.

    Args:
        rows: Finite numbers, float [clients, values], of at least one client.

    """
    lower, upper = (len(rows) - 1) // 2, len(rows) // 2
    return _mean_of_ranks(rows, lower, upper + 1)


def trimmed_mean(rows: Tensor, fraction: float) -> Tensor:
    """Return the mean of each column without its smallest and its largest values.

    Args:
        rows: Finite numbers, float [clients, values], of at least one client.
        fraction: Fraction of the rows left out at each end, rounded down; less than one half.

    """
    cut = trimmed_rows(len(rows), fraction)
    return _mean_of_ranks(rows, cut, len(rows) - cut)


def trimmed_rows(count: int, fraction: float) -> int:
    """Return how many of `count` values a trimmed mean leaves out at each end."""
    return min(math.floor(fraction * count + _ROUNDING), (count - 1) // 2)


def _mean_of_ranks(rows: Tensor, start: int, stop: int) -> Tensor:
    """Return the mean of each column over the values of rank `start` to `stop` - 1."""
    parts = [_sorted(chunk)[start:stop].mean(0) for chunk in torch.split(rows, _CHUNK, dim=1)]
    return torch.cat(parts) if parts else rows.new_zeros(0)


def _sorted(chunk: Tensor) -> Tensor:
    """Sort each column; on the CPU with numpy, which is several times as fast."""
    if chunk.device.type != "cpu":
        return chunk.sort(0).values
    columns = np.array(chunk.detach().numpy().T, order="C")  # a copy
    columns.sort(axis=1)
    return torch.from_numpy(columns.T)


def row_norms(parts: Sequence[Tensor]) -> Tensor:
    """Return the L2 norm of each client's values in all parts together, double [clients].

    Args:
        parts: At least one matrix, float [clients, values], with the same clients.

    """
    norms = [torch.linalg.vector_norm(part, dim=1, dtype=torch.float64) for part in parts]
    return torch.stack(norms).square().sum(0).sqrt()


def bounding_factors(norms: Tensor, bound: float | None = None) -> Tensor:
    """Return the factor on each row that reduces its norm to a bound, double [clients].

    Args:
        norms: Norm of each row, double [clients].
        bound: Largest norm. If None, the median of the norms.

    """
    largest = median(norms[:, None])[0] if bound is None else norms.new_tensor(bound)
    return torch.where(norms > largest, largest / norms, 1.0)


def scaled_mean(rows: Tensor, factors: Tensor) -> Tensor:
    """Return the mean of the rows, each times its factor.

    Args:
        rows: float [clients, values].
        factors: double [clients].

    """
    return (factors / len(factors)).to(rows.dtype) @ rows


def weight_cap(weights: Sequence[float], share: float) -> float:
    """Return the largest weight that leaves no client more than a share of the total.

    It solves t = share * sum(min(w_i, t)). If even equal weights exceed the share, it is the
    smallest weight that is not 0; if no weight exceeds the share, it is infinite.
    """
    positive = sorted((float(weight) for weight in weights if weight > 0), reverse=True)
    rest, count = sum(positive), len(positive)
    if count == 0 or positive[0] <= share * rest * (1 + _ROUNDING):
        return math.inf
    for capped, weight in enumerate(positive, start=1):
        rest -= weight
        left = 1 - capped * share
        if capped == count or left <= _ROUNDING:
            break
        if share * rest / left >= positive[capped]:
            return share * rest / left
    return positive[-1]
