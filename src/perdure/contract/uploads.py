"""What clients send and what the server holds of it after an exchange.

A field of an upload is a `Sum` (the server needs only the weighted sum, so that secure aggregation
applies) or an `Each` (the server must see every client's value).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic

import torch
from typing_extensions import TypeVar

from perdure.contract.checks import check_name, refuse
from perdure.core.trees import Tensors

S = TypeVar("S", default=Any)
C = TypeVar("C", default=Any)


@dataclass(frozen=True)
class Sum:
    """A field of which the server learns sum(weight * value) and sum(weight), nothing else."""

    value: Tensors
    weight: float | None = None
    """If None, the client's own weight: its number of examples, or 1 if weighting is uniform."""


@dataclass(frozen=True)
class Each:
    """A field that the server sees client by client. `Needs.per_client_fields` announces it."""

    value: Tensors


Field = Sum | Each
Upload = Mapping[str, Field]


@dataclass(frozen=True)
class LocalUpdate:
    """What local training changed, against what the client received."""

    update: Tensors
    """Change of every trained parameter that is not private."""
    buffers: Tensors
    """Change of the running statistics."""

    def as_stack(self) -> LocalUpdate:
        """Return it as a stack of one client: with a leading client axis."""
        parts = (self.update, self.buffers)
        return LocalUpdate(*({n: t.unsqueeze(0) for n, t in part.items()} for part in parts))


@dataclass(frozen=True)
class ClientResult(Generic[C]):
    """What a client sends, and its state afterwards."""

    fields: Upload = field(default_factory=dict)
    state: C | None = None
    """If None, the client's state does not change."""


@dataclass(frozen=True)
class Change(Generic[S]):
    """What a round does to the server: increments of the model, and the state after it."""

    params: Tensors
    buffers: Tensors
    state: S


@dataclass
class CollectedUploads:
    """What the server holds after an exchange."""

    sums: dict[str, Tensors] = field(default_factory=dict)
    """Weighted sums of the Sum fields."""
    weights: dict[str, float] = field(default_factory=dict)
    """Total weight of each Sum field."""
    per_client: dict[str, dict[int, Tensors]] = field(default_factory=dict)
    """Values of the Each fields by client, in the order of their index."""
    client_weights: dict[int, float] = field(default_factory=dict)
    """Weights of the clients that were counted; under secure aggregation the mean for each."""
    upload_fraction: float = 1.0
    """Fraction of the round's sampled clients that were counted."""
    staleness: Mapping[int, int] = field(default_factory=dict)
    """Rounds since each counted client began; all 0 unless aggregation is buffered."""

    @property
    def clients(self) -> list[int]:
        """The clients that were counted, in the order of their index."""
        return list(self.client_weights)

    def has(self, name: str) -> bool:
        """Return whether any client sent this field."""
        return name in self.sums or name in self.per_client

    def total(self, name: str) -> Tensors:
        """Return the weighted sum of a Sum field."""
        check_name("uploads.total", name, self.sums)
        return self.sums[name]

    def mean(self, name: str) -> Tensors:
        """Return the weighted mean of a field over the clients that were counted."""
        if name in self.per_client:
            return _mean_of_each(self.per_client[name], self.client_weights)
        if name not in self.sums:
            check_name("uploads.mean", name, (*self.sums, *self.per_client))
        weight = self.weights[name]
        if not weight:
            refuse(
                f"uploads.mean: {name!r}", "a total weight of 0", "weights of which one is not 0"
            )
        return {key: total / weight for key, total in self.sums[name].items()}


def _mean_of_each(values: dict[int, Tensors], weights: dict[int, float]) -> Tensors:
    total = sum(weights[client] for client in values)
    names = next(iter(values.values()))
    return {
        name: sum((weights[c] * v[name] for c, v in values.items()), torch.zeros(())) / total
        for name in names
    }
