"""One local step as a method's functions see it: rows, a forward pass, a loss.

Everything here is pure: on the vector engine it is vectorized over clients and traced.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from perdure.contract.checks import refuse
from perdure.core.trees import Tensors, Tree
from perdure.models.forward_pass import ForwardPass
from perdure.models.network import Network
from perdure.models.ops import cross_entropy


def _no_rows() -> slice:
    return slice(0, 0)


@dataclass(frozen=True)
class Batch:
    """The rows of a local step: extra rows first, then the client's own, padding last."""

    x: Tensor
    y: Tensor
    """int64 [rows]: the output that should win."""
    mask: Tensor | None = None
    """float [rows], 0 for padding; None: no row is padding. Only `Step.mean` needs it."""
    active_outputs: Tensor | None = None
    """bool [outputs] or [rows, outputs]: the outputs included in the loss; None: all."""
    cached_features: Tensor | None = None
    """What the network has computed of each row beforehand; None: nothing."""
    epoch: Tensor | None = None
    """int64 scalar: the local epoch, from 0; None: the first."""
    extra: int = 0
    """Number of extra rows; they are the first ones."""


@dataclass(frozen=True)
class Rows:
    """Rows that join a client's batch: replayed or synthetic examples."""

    x: Tensor
    y: Tensor
    mask: Tensor
    """float [rows]: 0 where there is no row (a client without a replay memory)."""
    active_outputs: Tensor | None = None
    """bool [rows, outputs]; None: those of the client's own rows."""


@dataclass(frozen=True)
class Scalar:
    """A loss that has no rows, or whose mean over rows the method took itself (`Step.mean`)."""

    value: Tensor


Term = Tensor | Scalar


@dataclass(frozen=True)
class Step:
    """One local step of one client."""

    params: Tensors
    """All parameters: those in training and the others."""
    batch: Batch
    broadcast: Tree
    """The fields that the server sent, and the global model as `params`."""
    tensors: Tensors
    """`Prepared.tensors` of this client."""
    key: Tensor
    """int64 scalar, different in every step: draws within a step are hashed from it."""
    network: Network
    fwd: ForwardPass
    extra: slice = field(default_factory=_no_rows)
    """The rows of the batch that this method added by `extra_rows`."""
    slices: Mapping[str, slice] = field(default_factory=dict)
    """The extra rows of each method of a combination."""
    memo: dict[str, Tensor] = field(default_factory=dict)

    def features(self) -> Tensor:
        """Return the head's input for every row; computed once per step."""
        if "features" not in self.memo:
            self.memo["features"] = self.network.features(self.params, self.batch.x, self.fwd)
        return self.memo["features"]

    def logits(self) -> Tensor:
        """Return the logits of every row; computed once per step."""
        if "logits" not in self.memo:
            self.memo["logits"] = self.classify(self.features())
        return self.memo["logits"]

    def classify(self, features: Tensor) -> Tensor:
        """Apply the head alone."""
        return self.network.classify(self.params, features, self.fwd)

    def logits_of(self, params: Tensors, buffers: Tensors) -> Tensor:
        """Return another model's logits of every row, in evaluation mode, without gradient."""
        fwd = ForwardPass(buffers=buffers, mask=self.batch.mask, under_vmap=self.fwd.stacked)
        return self.network.logits(params, self.batch.x, fwd).detach()

    def cross_entropy(self, logits: Tensor) -> Tensor:
        """Return the cross-entropy of every row among the active outputs: [rows]."""
        return cross_entropy_rows(logits, self.batch)

    def mean(self, values: Tensor, among: Tensor | None = None) -> Tensor:
        """Return the mean over the rows that are not padding.

        Args:
            values: One value per row.
            among: float [rows]: only rows where it is 1 count. Default: all rows.
        """
        mask = self.batch.mask
        if among is not None:
            mask = among if mask is None else mask * among
        return masked_mean(values, mask)


def cross_entropy_rows(logits: Tensor, batch: Batch) -> Tensor:
    """Return the cross-entropy of every row of a batch among its active outputs."""
    logits = _among_active(logits, batch)
    if batch.mask is None:  # one operation, which vmap would not do as one
        return F.cross_entropy(logits, batch.y, reduction="none")
    return cross_entropy(logits, batch.y)


def mean_cross_entropy(logits: Tensor, batch: Batch) -> Tensor:
    """Return the mean of `cross_entropy_rows` over the rows that are not padding."""
    if batch.mask is None:  # the same in one operation
        return F.cross_entropy(_among_active(logits, batch), batch.y)
    return masked_mean(cross_entropy_rows(logits, batch), batch.mask)


def _among_active(logits: Tensor, batch: Batch) -> Tensor:
    active = batch.active_outputs
    return logits if active is None else logits.masked_fill(~active, -1e9)


def masked_mean(values: Tensor, mask: Tensor | None) -> Tensor:
    """Return the mean of the values where the mask is 1; 0 if it is 1 nowhere."""
    if mask is None:
        return values.mean()
    return (values * mask).sum() / mask.sum().clamp(min=1.0)


def mean_term(where: str, term: Term | list[Term], step: Step) -> Tensor:
    """Return the engine's mean of what `loss` or `penalty` returned; refuse anything else."""
    if isinstance(term, list):
        means = [mean_term(where, each, step) for each in term]
        return sum(means[1:], means[0])
    if isinstance(term, Scalar):
        if term.value.dim():
            refuse(where, f"a Scalar of shape {list(term.value.shape)}", "a Scalar of one value")
        return term.value
    _check_rows(where, term, len(step.batch.y))
    return step.mean(term)


def _check_rows(where: str, term: Any, rows: int) -> None:
    allowed = f"one value per row ([{rows}])"
    if not isinstance(term, Tensor):
        refuse(where, f"a {type(term).__name__}", f"a tensor with {allowed}")
    if term.dim() == 0:
        refuse(
            where, "a single value",
            f"{allowed}, which the engine averages over the rows that are not padding "
            "(reduction='none'); or Scalar(value) if it is no mean over rows",
        )  # fmt: skip
    if term.shape != (rows,):
        refuse(where, f"shape {list(term.shape)}", allowed)


def join_rows(step: Step, rows: Rows | dict[str, Rows]) -> Step:
    """Return the step with more rows in front of the client's own."""
    named = rows if isinstance(rows, dict) else {"": rows}
    parts, batch = list(named.values()), step.batch
    for part in parts:
        _check_extra(part, batch)
    mask = torch.ones_like(batch.y, dtype=torch.float32) if batch.mask is None else batch.mask
    joined = Batch(
        torch.cat([*(part.x for part in parts), batch.x]),
        torch.cat([*(part.y for part in parts), batch.y]),
        torch.cat([*(part.mask.to(mask.dtype) for part in parts), mask]),
        _joined_outputs(parts, batch),
        None,
        batch.epoch,
        sum(len(part.y) for part in parts),
    )
    slices = _slices(named)
    fwd = replace(step.fwd, mask=joined.mask)
    extra = slices.get("", _no_rows())
    return replace(step, batch=joined, fwd=fwd, slices=slices, extra=extra, memo={})


def _check_extra(rows: Rows, batch: Batch) -> None:
    if not isinstance(rows, Rows):
        refuse("extra_rows", f"a {type(rows).__name__}", "Rows")
    if not len(rows.x) == len(rows.y) == len(rows.mask):
        counts = f"{len(rows.x)} x, {len(rows.y)} y and {len(rows.mask)} mask"
        refuse("extra_rows", counts, "one of each per row")
    if rows.x.shape[1:] != batch.x.shape[1:]:
        shape = f"rows of shape {list(rows.x.shape[1:])}"
        refuse("extra_rows", shape, f"{list(batch.x.shape[1:])}")


def _joined_outputs(parts: list[Rows], batch: Batch) -> Tensor | None:
    active = batch.active_outputs
    if active is None:
        return None
    each = [
        active.expand(len(part.y), -1) if part.active_outputs is None else part.active_outputs
        for part in parts
    ]
    return torch.cat([*each, active.expand(len(batch.y), -1)])


def _slices(named: dict[str, Rows]) -> dict[str, slice]:
    slices, first = {}, 0
    for name, rows in named.items():
        slices[name] = slice(first, first + len(rows.y))
        first += len(rows.y)
    return slices
