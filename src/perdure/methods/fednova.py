"""FedNova: the mean of normalized updates, so that clients with more steps do not pull harder.

Wang, Liu, Liang, Joshi, Poor: Tackling the Objective Inconsistency Problem in Heterogeneous
Federated Optimization, NeurIPS 2020. With D_i the update of client i, p_i its weight and a_i the
number of local steps that its update is worth:
    w <- w + (sum_i p_i a_i) sum_i p_i D_i / a_i
For k steps of SGD a_i = k; with momentum r it is (k - r (1 - r^k) / (1 - r)) / (1 - r).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from perdure.contract import (
    Client,
    ClientResult,
    CollectedUploads,
    Context,
    Exchange,
    LocalUpdate,
    Method,
    Server,
    Sum,
    Train,
    stacked,
)
from perdure.core.trees import Tensors


@dataclass(frozen=True)
class FedNova(Method):
    """Normalized averaging. With equally many steps on every client it is FedAvg."""

    paper: ClassVar[str] = "Wang et al., NeurIPS 2020"

    def check_config(self, config: Any) -> str | None:
        """Refuse optimizers whose updates are not sums of gradients with known weights."""
        kind = config.train.optimizer.kind
        if kind != "sgd":
            return f"train.optimizer: must be sgd with fednova, got {kind!r}"
        return None

    def exchanges(self, context: Context) -> list[Exchange | Train]:
        """Train with normalized updates."""
        return [Train(make_upload=self.normalize, combine=self.rescale)]

    @stacked
    def normalize(self, clients: list[Client], local: LocalUpdate) -> ClientResult:
        """Send D_i / a_i, and a_i."""
        steps = torch.tensor([effective_steps(client) for client in clients])
        update = {
            n: d / steps.view(-1, *[1] * (d.dim() - 1)).to(d) for n, d in local.update.items()
        }
        return ClientResult({"update": Sum(update), "steps": Sum({"steps": steps})})

    def rescale(self, server: Server, uploads: CollectedUploads, context: Context) -> Tensors:
        """Return (sum_i p_i a_i) sum_i p_i D_i / a_i."""
        steps = float(uploads.mean("steps")["steps"])
        return {name: steps * value for name, value in uploads.mean("update").items()}


def effective_steps(client: Client) -> float:
    """Return a_i: how many plain steps the update of a client is worth."""
    steps, r = client.steps, client.momentum
    return (steps - r * (1 - r**steps) / (1 - r)) / (1 - r)
