"""Uploads: the fields that clients send, and their sums on the server after an exchange.

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
"""Type of the server state."""
C = TypeVar("C", default=Any)
"""Type of the client state."""


@dataclass(frozen=True)
class Sum:
    """A field of which the server learns sum(weight * value) and sum(weight), nothing else."""

    value: Tensors
    """Tensors by name, of the same shapes for all clients."""
    weight: float | None = None
    """Weight in the sum. If None, the client's weight: its number of examples, or 1 (uniform)."""


@dataclass(frozen=True)
class Each:
    """A field that the server sees per client. It must be named in `Needs.per_client_fields`."""

    value: Tensors
    """Tensors by name; shapes may differ between clients."""


Field = Sum | Each
Upload = Mapping[str, Field]
"""The fields that one client sends, by name."""


@dataclass(frozen=True)
class LocalUpdate:
    """The change of the model by local training, relative to what the client received."""

    update: Tensors
    """Change of every trained parameter that is not private."""
    buffers: Tensors
    """Change of the running statistics."""

    def as_stack(self) -> LocalUpdate:
        """Return the same update with a leading client axis, as a stack of one client."""
        both = (self.update, self.buffers)
        return LocalUpdate(*({n: t.unsqueeze(0) for n, t in values.items()} for values in both))


@dataclass(frozen=True)
class ClientResult(Generic[C]):
    """The fields that a client sends, and its state afterwards."""

    fields: Upload = field(default_factory=dict)
    """Fields by name."""
    state: C | None = None
    """New client state. If None, the client's state does not change."""


@dataclass(frozen=True)
class Change(Generic[S]):
    """The effect of a round on the server: increments of the model, and the state after it."""

    params: Tensors
    """Increments of parameters."""
    buffers: Tensors
    """Increments of running statistics."""
    state: S
    """Server state after the round."""


@dataclass
class CollectedUploads:
    """The uploads of an exchange as the server holds them: sums, weights and per-client values."""

    sums: dict[str, Tensors] = field(default_factory=dict)
    """Weighted sum of each Sum field."""
    weights: dict[str, float] = field(default_factory=dict)
    """Total weight of each Sum field."""
    per_client: dict[str, dict[int, Tensors]] = field(default_factory=dict)
    """Values of each Each field by client, in the order of their index."""
    client_weights: dict[int, float] = field(default_factory=dict)
    """Weights of the counted clients; under secure aggregation every client has the mean weight."""
    upload_fraction: float = 1.0
    """Fraction of the round's sampled clients that were counted."""
    staleness: Mapping[int, int] = field(default_factory=dict)
    """By client, how many rounds late its upload is; 0 unless aggregation is buffered."""
    noise: Mapping[str, float] = field(default_factory=dict)
    """Standard deviation of the Gaussian noise on each number of a Sum field's sum, which
    `privacy.noise` adds. Fields without noise are not in it."""

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
            return _mean_per_client(self.per_client[name], self.client_weights)
        if name not in self.sums:
            check_name("uploads.mean", name, (*self.sums, *self.per_client))
        weight = self.weights[name]
        if not weight:
            where = f"uploads.mean: {name!r}"
            refuse(where, "a total weight of 0", "a field with a total weight that is not 0")
        return {key: total / weight for key, total in self.sums[name].items()}


def _mean_per_client(values: dict[int, Tensors], weights: dict[int, float]) -> Tensors:
    total = sum(weights[client] for client in values)
    names = next(iter(values.values()))
    return {
        name: sum((weights[c] * v[name] for c, v in values.items()), torch.zeros(())) / total
        for name in names
    }
