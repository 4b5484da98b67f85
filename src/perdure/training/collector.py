"""Uploads in transit, how the server adds them up, and how much one client may count."""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from perdure.algebra.robust import weight_cap
from perdure.config import Config
from perdure.config.train import Aggregation
from perdure.contract.context import Client, Context
from perdure.contract.needs import max_weight
from perdure.contract.uploads import (
    CollectedUploads,
    Each,
    FailedUpload,
    Field,
    MaskedUpload,
    StackedUploads,
    WeightBounds,
)
from perdure.core.errors import refuse
from perdure.core.trees import Tensors
from perdure.data.examples import Array
from perdure.privacy.chain import PrivacyChain
from perdure.privacy.mechanism import Place
from perdure.training.aggregation import RULE_FIELDS
from perdure.training.ledger import Ledger

if TYPE_CHECKING:
    from perdure.training.experiment import Experiment


# ---- Uploads in transit, of one client or a stack of clients, and how the server adds them up

_LARGEST = 2.0**100
"""Bound on weights and weighted values: float32 holds the sum of 2^27 of them."""


class UploadCollector:
    """Adds up uploads as they arrive, which must be in the order of the clients' index."""

    is_incremental = True
    """Whether an added upload is counted regardless of the uploads after it."""

    def __init__(
        self,
        chain: PrivacyChain | None = None,
        place: Place | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        """Collect the uploads of one exchange.

        Args:
            chain: The privacy of the run. If None, uploads are not protected.
            place: The exchange, if there is a chain.
            ledger: Counts the bytes of uploads. If None, they are not counted.

        """
        self.chain, self.place, self.ledger = chain, place, ledger
        self.collected = CollectedUploads()
        """The sums and per-client values so far."""
        self.rejected: list[int] = []
        """Clients whose upload is not finite."""
        self.failures: list[FailedUpload] = []
        """Clients without a usable upload."""
        self.empty_uploads = 0
        """Number of clients that did their work and had nothing to send."""
        self.abort_reason: str | None = None
        """Why the exchange must be repeated with other clients. If None, it need not."""
        self.uploaded: set[int] = set()
        """Clients that uploaded masked values, or declined to, in any attempt at this exchange."""
        self.rule: Aggregation | None = None
        """How `update` and `buffers` become one. If None, they are summed as they arrive; else the
        values of all clients are kept until the collection is closed."""
        self.keeps_uploads = chain is not None and not chain.simulated
        """Whether uploads are kept, so that they can be collected again without some clients: other
        machines may send anything."""
        self.weight_cap = math.inf
        """Number of examples beyond which a client's do not count."""
        self._kept: dict[str, dict[str, list[Tensor]]] = {}
        self._arrived: list[StackedUploads] = []

    def add(self, uploads: StackedUploads | MaskedUpload | FailedUpload) -> None:
        """Add uploads and count their bytes; clients with a value that is not finite are rejected.

        Simulated clients protect their uploads here; nodes have done it themselves.
        """
        if isinstance(uploads, MaskedUpload):
            raise TypeError("a masked upload requires secure aggregation")
        if isinstance(uploads, FailedUpload):
            self.failures.append(uploads)
            return
        chain = self.chain
        if chain is not None and self.place is not None and chain.simulated and chain.active:
            uploads = chain.on_clients(uploads, self.place)
        if self.ledger is not None:
            self.ledger.count_uploads(uploads)
        self._add_up(uploads)

    def _add_up(self, uploads: StackedUploads) -> None:
        """Add the values of all clients that sent finite ones."""
        is_finite = finite_clients(uploads)
        if not all(is_finite):
            self.rejected += [c for c, ok in zip(uploads.clients, is_finite, strict=True) if not ok]
            uploads = _select(uploads, is_finite)
        if self.keeps_uploads:
            self._arrived.append(uploads)
        for client, weight in zip(uploads.clients, uploads.weights, strict=True):
            self.collected.client_weights[client] = weight
        if uploads.clients:
            for name, field in uploads.fields.items():
                self._add_field(name, field, uploads)

    def close(self) -> None:
        """Finish after the last upload: apply the rule, and the server's part of the privacy."""
        for name, kept in self._kept.items():
            assert self.rule is not None
            stacked = {key: torch.cat(rows) for key, rows in kept.items()}
            self.collected.sums[name] = self.rule.combine(stacked)
            self.collected.weights[name] = 1.0
        self._kept = {}
        if self.chain is not None and self.place is not None and self.chain.active:
            self.collected = self.chain.on_server(self.collected, self.place)

    def _keep(self, name: str, value: Tensors) -> None:
        """Keep the values of a field for the rule."""
        kept = self._kept.setdefault(name, {key: [] for key in value})
        for key, tensor in value.items():
            rows = kept.get(key)
            if rows is None or (rows and rows[0].shape[1:] != tensor.shape[1:]):
                refuse(f"Sum: {key!r}", f"shape {list(tensor.shape[1:])}", "as of other clients")
            rows.append(tensor)

    def reopen(self, context: Context) -> UploadCollector:
        """Return the collector for another attempt at an aborted exchange."""
        raise TypeError("only secure sums are attempted again")

    def only(self, clients: set[int]) -> CollectedUploads:
        """Return the uploads of these clients alone, if `keeps_uploads`."""
        part = copy(self)
        part.collected, part.rejected, part._arrived = CollectedUploads(), [], []
        for uploads in self._arrived:
            chosen = _select(uploads, [client in clients for client in uploads.clients])
            part._add_up(chosen)  # their bytes were counted when they arrived
        part.close()
        return part.collected

    def _add_field(self, name: str, field: Field, uploads: StackedUploads) -> None:
        if isinstance(field, Each):
            for row, client in enumerate(uploads.clients):
                value = {key: tensor[row] for key, tensor in field.value.items()}
                self.collected.per_client.setdefault(name, {})[client] = value
            return
        if self.rule is not None and name in RULE_FIELDS:
            self._keep(name, field.value)
            return
        count = len(uploads.clients)
        weights = uploads.weights if field.weight is None else (field.weight,) * count
        totals = self.collected.sums.setdefault(name, {})
        for key, stacked in field.value.items():
            # integers would truncate the weights, and half precision could overflow
            stacked = stacked.to(torch.promote_types(stacked.dtype, torch.float32))
            if count == 1:
                total = stacked[0] * weights[0]
            else:
                total = torch.tensordot(stacked.new_tensor(weights), stacked, dims=1)
            if key in totals and totals[key].shape != total.shape:
                expected = f"of shape {list(totals[key].shape)}, which another client sent"
                refuse(f"Sum: {key!r}", f"shape {list(total.shape)}", expected)
            totals[key] = totals[key] + total if key in totals else total
        self.collected.weights[name] = self.collected.weights.get(name, 0.0) + sum(weights)


def finite_clients(uploads: StackedUploads) -> list[bool]:
    """Return for each client whether all that it sent is finite, sums also times their weight.

    Weights and weighted values are bounded, so that no sum over clients can overflow.
    """
    weights = torch.tensor(uploads.weights, dtype=torch.float64)
    is_finite = weights.abs() <= _LARGEST  # false for NaN
    for field in uploads.fields.values():
        factors = weights
        if isinstance(field, Each):  # not summed
            factors = torch.zeros_like(weights)
        elif field.weight is not None:
            factors = torch.full_like(weights, field.weight)
        is_finite &= factors.abs() <= _LARGEST
        for tensor in field.value.values():
            is_finite &= _bounded_rows(tensor.unsqueeze(-1).flatten(1), factors.abs())
    return [bool(ok) for ok in is_finite]


def _bounded_rows(rows: Tensor, factors: Tensor) -> Tensor:
    """Return for each row whether its values are finite, and times its factor not too large."""
    values = rows if rows.is_floating_point() else rows.float()
    # the norm bounds all values and is found faster than the largest one, but may overflow
    sizes = torch.linalg.vector_norm(values, dim=1).double().cpu()
    is_bounded: Tensor = torch.isfinite(sizes) & (sizes * factors <= _LARGEST)
    if bool(is_bounded.all()) or not rows.shape[1]:
        return is_bounded
    sizes = values.abs().amax(1).double().cpu()
    is_bounded = torch.isfinite(sizes) & (sizes * factors <= _LARGEST)
    return is_bounded


def _select(uploads: StackedUploads, included: list[bool]) -> StackedUploads:
    rows = [row for row, ok in enumerate(included) if ok]
    fields = {
        name: replace(field, value={key: tensor[rows] for key, tensor in field.value.items()})
        for name, field in uploads.fields.items()
    }
    return StackedUploads(
        tuple(uploads.clients[row] for row in rows),
        tuple(uploads.weights[row] for row in rows),
        fields,
    )


# ---- How much one client may count: weights from the sizes that clients announced, capped
#
# A node of a federation can announce any number of examples. It counts with at most
# `federation.max_node_share` of the weight of the clients that are asked in an exchange.


def weight_bounds(
    experiment: Experiment, context: Context, clients: Sequence[int]
) -> WeightBounds | None:
    """Return the largest weights of the clients of an exchange."""
    config, needs = experiment.config, experiment.needs
    if config.federation is None and not config.privacy.secagg:
        return None
    sizes = experiment.task(context.task).partition.sizes
    rows = {client: float(sizes[client]) for client in clients}
    cap = largest_size(config, list(rows.values()), int(np.count_nonzero(sizes)))
    return WeightBounds(cap, {c: max_weight(needs, min(n, cap)) for c, n in rows.items()})


def largest_size(config: Config, sizes: Sequence[float], nodes: int) -> float:
    """Return the number of examples beyond which a client's do not count."""
    if config.federation is None:
        return math.inf
    share = config.federation.share_of(nodes)
    return math.inf if share is None else weight_cap(sizes, share)


def capped_sizes(config: Config, sizes: Array) -> Array:
    """Return how many examples of each client count, of all clients together: [clients]."""
    cap = largest_size(config, sizes.tolist(), int(np.count_nonzero(sizes)))
    return sizes if cap == math.inf else np.minimum(sizes, math.ceil(cap))


def with_cap(client: Client, cap: float) -> Client:
    """Return a client that counts with no more than `cap` examples."""
    if cap == math.inf:
        return client
    return replace(client, weight=min(client.weight, cap), weight_cap=cap)
