"""Rules of aggregation on stacked fields of uploads, and the check that a server is finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from perdure.algebra.robust import bounding_factors, median, row_norms, scaled_mean, trimmed_mean
from perdure.config import AggregationConfig, NormBoundAggregation, TrimmedMeanAggregation
from perdure.contract.context import Server
from perdure.contract.states import to_tree
from perdure.core.errors import RunError
from perdure.core.trees import Tensors

# ------------------------------------------------------------------------------------------------
# The rules of `train.aggregation` on stacked fields of uploads.
# ------------------------------------------------------------------------------------------------

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


# ------------------------------------------------------------------------------------------------
# The check that a server is finite, without which nothing of it is kept or saved.
# ------------------------------------------------------------------------------------------------


def check_finite(before: Server, server: Server, where: str) -> None:
    """Refuse a server with a value that is not finite; values that did not change are skipped.

    Raises:
        RunError: A parameter, a buffer or a number of the state is not finite.

    """
    known = {id(value) for _, value in _leaves("", [before.params, before.buffers])}
    parts: dict[str, Any] = {"parameters": server.params, "buffers": server.buffers}
    if server.state is not before.state:
        known |= {id(value) for _, value in _leaves("", to_tree(before.state))}
        parts["state"] = to_tree(server.state)
    for name, value in _leaves("", parts):
        if id(value) not in known and not _is_finite(value):
            raise RunError(
                f"{where}: {name} of the server would not be finite; the run stops at its last "
                "checkpoint"
            )


def _leaves(name: str, tree: Any) -> Iterator[tuple[str, Any]]:
    """Yield the numbers and tensors of a tree with their names."""
    if isinstance(tree, dict | list):
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        for key, value in items:
            yield from _leaves(f"{name}/{key}" if name else str(key), value)
    elif isinstance(tree, Tensor | float):
        yield name, tree


def _is_finite(value: Tensor | float) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if not value.is_floating_point():
        return True
    # a finite sum has only finite terms and is checked faster; large terms may overflow it
    return bool(torch.isfinite(value.sum())) or bool(torch.isfinite(value).all())
