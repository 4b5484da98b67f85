"""Rules by which the server turns updates into one, and the check that a server is finite."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar

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
from perdure.contract.context import Server
from perdure.contract.states import to_tree
from perdure.core.errors import RunError, bad_value
from perdure.core.registry import Registry
from perdure.core.trees import Tensors

# ------------------------------------------------------------------------------------------------
# The rules of `train.aggregation`, on stacked fields of uploads.
# ------------------------------------------------------------------------------------------------

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
