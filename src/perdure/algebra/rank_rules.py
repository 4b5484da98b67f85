"""How many directions of a decomposition are kept. Singular values s come in descending order."""

from __future__ import annotations

import torch
from torch import Tensor

from perdure.algebra.subspaces import TOLERANCE


def significant(singular: Tensor, scale: Tensor | None = None) -> int:
    """The number of singular values that are more than rounding."""
    if len(singular) == 0:
        return 0
    largest = singular[0] if scale is None else scale
    return int((singular > TOLERANCE * largest).sum()) if largest > 0 else 0


def uncovered_rank(singular: Tensor, threshold: float, uncovered: float) -> int:
    """FOT's rule: the smallest r with (1 - rho) + rho * share_r > threshold.

    rho (`uncovered`) is the share of the inputs that lies outside the space so far, share_r that of
    the squared singular values in the first r. Nothing is added where 1 - rho is enough.
    """
    if uncovered <= 1 - threshold:
        return 0
    squares = singular.double().square()
    shares = squares.cumsum(0) / squares.sum()
    enough = (1 - uncovered) + uncovered * shares > threshold
    return _first(enough, singular)


def mass_rank(singular: Tensor, threshold: float) -> int:
    """FedProTIP's eq. 8: the smallest r whose singular values are `threshold` of their sum."""
    if significant(singular) == 0:
        return 0
    values = singular.double()
    return _first(values.cumsum(0) / values.sum() >= threshold, singular)


def energy_rank(singular: Tensor, threshold: float, total: float) -> int:
    """GPM's rule: the smallest r, from 0, with covered + sum_{i<=r} s_i^2 / total >= threshold.

    `total` is ||A||_F^2 of the inputs before projection and s are the singular values after it, so
    what the space covers already is 1 - sum s^2 / total.
    """
    if total <= 0:
        return 0
    squares = singular.double().square()
    covered = 1 - float(squares.sum()) / total
    if covered >= threshold:
        return 0
    return _first(covered + squares.cumsum(0) / total >= threshold, singular)


def _first(enough: Tensor, singular: Tensor) -> int:
    """1 + the first place where it is enough; if it never is, all that is more than rounding."""
    places = torch.nonzero(enough)
    most = significant(singular)
    return min(int(places[0]) + 1, most) if len(places) else most
