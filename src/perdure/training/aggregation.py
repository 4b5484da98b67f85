"""Rules by which the server turns updates into one."""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from perdure.algebra.robust import (
    bounding_factors,
    median,
    row_norms,
    scaled_mean,
    trimmed_mean,
    trimmed_rows,
)
from perdure.config.section import NOT_BOOL, PositiveFloat
from perdure.config.train import Aggregation
from perdure.core.errors import bad_value
from perdure.core.registry import Registry
from perdure.core.trees import Tensors

AGGREGATIONS: Registry[Aggregation] = Registry(
    key="train.aggregation.kind", base=Aggregation, base_name="perdure.config.train.Aggregation",
    group="perdure.aggregations",
    builtin={
        "mean": "perdure.training.aggregation.Mean",
        "median": "perdure.training.aggregation.Median",
        "trimmed_mean": "perdure.training.aggregation.TrimmedMean",
        "norm_bound": "perdure.training.aggregation.NormBound",
    },
)  # fmt: skip
RULE_FIELDS = ("update", "buffers")
"""Fields of training uploads to which a rule is applied, each alone."""


class Mean(Aggregation):
    """The mean, weighted by `train.weighting`. One hostile client can move it anywhere.

    Example: `aggregation: mean`
    """

    is_sum: ClassVar[bool] = True


class Median(Aggregation):
    """The median of each parameter's changes.

    Example: `aggregation: median`
    """

    def combine(self, stacked: Tensors) -> Tensors:
        """Return the median of each value."""
        return {name: median(_rows(v)).reshape(v.shape[1:]) for name, v in stacked.items()}


class TrimmedMean(Aggregation):
    """The mean of each parameter's changes, without the smallest and the largest ones.

    Example: `aggregation: {kind: trimmed_mean, fraction: 0.3}`
    """

    fraction: Annotated[float, Field(gt=0, lt=0.5, allow_inf_nan=False), NOT_BOOL] = 0.2
    """Fraction of a round's clients left out at each end, rounded down: at least that of the
    hostile, and at least one client."""

    def check(self, clients: int) -> None:
        """Refuse a fraction that would leave out none of a round's clients."""
        if not trimmed_rows(clients, self.fraction):
            expected = f"large enough to leave out one of {clients} clients at each end"
            raise bad_value("train.aggregation.fraction", self.fraction, expected)

    def combine(self, stacked: Tensors) -> Tensors:
        """Return the mean of each value without `fraction` of the clients at either end."""
        return {
            name: trimmed_mean(_rows(v), self.fraction).reshape(v.shape[1:])
            for name, v in stacked.items()
        }


class NormBound(Aggregation):
    """The mean of the updates, of which larger ones are scaled down to a norm.

    Example: `aggregation: {kind: norm_bound, norm: 1.0}`
    """

    norm: PositiveFloat | None = None
    """Largest norm of a client's update. If None, the median norm of the round's updates."""

    def combine(self, stacked: Tensors) -> Tensors:
        """Return the mean of the clients' values, each of at most the norm over all tensors."""
        if not stacked:
            return {}
        norms = row_norms([_rows(value) for value in stacked.values()])
        factors = bounding_factors(norms, self.norm)
        return {
            name: scaled_mean(_rows(v), factors).reshape(v.shape[1:]) for name, v in stacked.items()
        }


def _rows(value: Tensor) -> Tensor:
    """Return a stacked tensor as float [clients, values]."""
    return value.to(torch.promote_types(value.dtype, torch.float32)).reshape(len(value), -1)
