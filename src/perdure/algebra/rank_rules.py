"""Rules for how many directions of a decomposition are kept.

All functions take the singular values s in descending order, float [r].
"""

from __future__ import annotations

import torch
from torch import Tensor

from perdure.algebra.subspaces import TOLERANCE


def count_significant(singular: Tensor, scale: Tensor | None = None) -> int:
    """Return the number of singular values that are more than rounding.

    Args:
        singular: Singular values, float [r].
        scale: Size that rounding is relative to. If None, the largest singular value.
    """
    if len(singular) == 0:
        return 0
    largest = singular[0] if scale is None else scale
    return int((singular > TOLERANCE * largest).sum()) if largest > 0 else 0


def uncovered_rank(
    singular: Tensor, threshold: float, uncovered: float, energy: float | None = None
) -> int:
    """Return FOT's rank: the smallest r with (1 - rho) + rho * fraction_r > threshold.

    Args:
        singular: Singular values, float [r].
        threshold: Fraction of the inputs that the subspace should cover.
        uncovered: The paper's rho, the fraction of the inputs outside the subspace so far;
            fraction_r is that of the squared singular values in the first r. If 1 - rho is enough,
            the rank is 0.
        energy: Squared norm of which fraction_r is a fraction, if small values were left out. If
            None, that of the singular values.
    """
    if uncovered <= 1 - threshold:
        return 0
    squares = singular.double().square()
    fractions = squares.cumsum(0) / (squares.sum() if energy is None else energy)
    is_enough = (1 - uncovered) + uncovered * fractions > threshold
    return _first(is_enough, singular)


def mass_rank(singular: Tensor, threshold: float) -> int:
    """Return FedProTIP's rank (eq. 8): the smallest r whose s_i sum to `threshold` of their sum."""
    if count_significant(singular) == 0:
        return 0
    values = singular.double()
    return _first(values.cumsum(0) / values.sum() >= threshold, singular)


def energy_rank(singular: Tensor, threshold: float, total: float) -> int:
    """Return GPM's rank: the smallest r >= 0 with covered + sum_{i<=r} s_i^2 / total >= threshold.

    Args:
        singular: Singular values of the inputs after projection, float [r].
        threshold: Fraction of the inputs' energy that the subspace should cover.
        total: ||A||_F^2 of the inputs before projection, so that the subspace already covers
            1 - sum s^2 / total.
    """
    return covering_rank(singular, threshold, total, float(singular.double().square().sum()))


def covering_rank(singular: Tensor, threshold: float, total: float, outside: float) -> int:
    """Return the smallest r, from 0, with 1 - outside/total + sum_{i<=r} s_i^2/total >= threshold.

    Args:
        singular: Singular values of inputs outside a protected subspace, in descending order;
            small ones may have been left out.
        threshold: Fraction of the energy to cover.
        total: Energy |A|^2 of the inputs.
        outside: Energy of the inputs outside the protected subspace.
    """
    if total <= 0:
        return 0
    covered = 1 - outside / total
    if covered >= threshold:
        return 0
    return _first(covered + singular.double().square().cumsum(0) / total >= threshold, singular)


def _first(is_enough: Tensor, singular: Tensor) -> int:
    """Return 1 + the first index that is enough; if none is, the number of significant values."""
    indices = torch.nonzero(is_enough)
    largest = count_significant(singular)
    return min(int(indices[0]) + 1, largest) if len(indices) else largest
