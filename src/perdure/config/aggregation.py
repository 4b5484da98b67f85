"""How the server turns the clients' updates of a round into one: `train.aggregation`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from perdure.config.base import ByKind, ConfigSection
from perdure.config.types import NOT_BOOL, PositiveFloat


class MeanAggregation(ConfigSection):
    """The mean, weighted by `train.weighting`. One hostile client can move it anywhere.

    Example: `aggregation: mean`
    """

    kind: Literal["mean"] = "mean"
    """How the server turns the clients' updates of a round into one: mean, median, trimmed_mean or
    norm_bound. All but the mean give every client the same weight, keep the updates of a round's
    clients in memory at the same time, and need updates that the server sees."""


class MedianAggregation(ConfigSection):
    """The median of each parameter's changes.

    Example: `aggregation: median`
    """

    kind: Literal["median"] = "median"


class TrimmedMeanAggregation(ConfigSection):
    """The mean of each parameter's changes, without the smallest and the largest ones.

    Example: `aggregation: {kind: trimmed_mean, fraction: 0.3}`
    """

    kind: Literal["trimmed_mean"] = "trimmed_mean"
    fraction: Annotated[float, Field(gt=0, lt=0.5, allow_inf_nan=False), NOT_BOOL] = 0.2
    """Fraction of a round's clients left out at each end, rounded down: at least that of the
    hostile, and at least one client."""


class NormBoundAggregation(ConfigSection):
    """The mean of the updates, of which larger ones are scaled down to a norm.

    Example: `aggregation: {kind: norm_bound, norm: 1.0}`
    """

    kind: Literal["norm_bound"] = "norm_bound"
    norm: PositiveFloat | None = None
    """Largest norm of a client's update. If None, the median norm of the round's updates."""


AGGREGATIONS = ("mean", "median", "trimmed_mean", "norm_bound")


def _named(value: Any) -> Any:
    if isinstance(value, str) and value not in AGGREGATIONS:
        raise PydanticCustomError("must_be", "'mean', 'median', 'trimmed_mean' or 'norm_bound'")
    return {"kind": value} if isinstance(value, str) else value


AggregationConfig = Annotated[
    MeanAggregation | MedianAggregation | TrimmedMeanAggregation | NormBoundAggregation,
    ByKind(),
    BeforeValidator(_named),
]
