"""The rules of `train.aggregation` on stacked fields of uploads."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from perdure.algebra.robust import bounding_factors, median, row_norms, scaled_mean, trimmed_mean
from perdure.config import AggregationConfig, NormBoundAggregation, TrimmedMeanAggregation
from perdure.core.trees import Tensors

Rule = Callable[[Tensors], Tensors]
"""Turns tensors with a leading client axis into tensors without it. All clients count alike."""
RULE_FIELDS = ("update", "buffers")
"""Fields of training uploads to which a rule is applied, each alone."""


def make_rule(config: AggregationConfig) -> Rule | None:
    """Return the rule of `train.aggregation`, or None for the weighted mean."""
    if config.kind == "mean":
        return None
    if isinstance(config, NormBoundAggregation):
        norm = config.norm
        return lambda stacked: bounded_mean(stacked, norm)
    if isinstance(config, TrimmedMeanAggregation):
        fraction = config.fraction
        return lambda stacked: by_value(stacked, lambda rows: trimmed_mean(rows, fraction))
    return lambda stacked: by_value(stacked, median)


def by_value(stacked: Tensors, rule: Callable[[Tensor], Tensor]) -> Tensors:
    """Apply a rule on float [clients, values] to each tensor."""
    return {name: rule(_rows(value)).reshape(value.shape[1:]) for name, value in stacked.items()}


def bounded_mean(stacked: Tensors, norm: float | None) -> Tensors:
    """Return the mean of the clients' values, scaled down to a norm over all tensors together."""
    if not stacked:
        return {}
    factors = bounding_factors(row_norms([_rows(value) for value in stacked.values()]), norm)
    return by_value(stacked, lambda rows: scaled_mean(rows, factors))


def _rows(value: Tensor) -> Tensor:
    """Return a stacked tensor as float [clients, values]."""
    return value.to(torch.promote_types(value.dtype, torch.float32)).reshape(len(value), -1)
