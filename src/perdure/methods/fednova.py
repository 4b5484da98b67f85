"""FedNova: the mean of normalized updates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from perdure.contract.context import Client, Context, Server
from perdure.contract.exchanges import Exchange, Train, stacked
from perdure.contract.method import Method
from perdure.contract.needs import Needs, Preferences
from perdure.contract.uploads import ClientResult, CollectedUploads, LocalUpdate, Sum
from perdure.core.trees import Tensors, per_client


@dataclass(frozen=True)
class FedNova(Method):
    """Normalized averaging: clients with more local steps do not get more influence.

    With D_i the update of client i, p_i its weight and a_i the number of plain steps to which its
    update corresponds:
        w <- w + (sum_i p_i a_i) sum_i p_i D_i / a_i
    For k steps of SGD a_i = k; with momentum r it is (k - r (1 - r^k) / (1 - r)) / (1 - r). If all
    clients take equally many steps, this is FedAvg. Clients send D_i / a_i and the number a_i.

    Reference: Wang, Liu, Liang, Joshi, Poor: Tackling the Objective Inconsistency Problem in
    Heterogeneous Federated Optimization, NeurIPS 2020.
    """

    title: ClassVar[str] = "FedNova"
    family: ClassVar[str] = "Baselines"
    idea: ClassVar[str] = "The mean of normalized updates, whatever the clients' local steps."
    paper: ClassVar[str] = "Wang et al., NeurIPS 2020"
    needs: ClassVar[Needs] = Needs(prefers=Preferences(head={"split": "growing"}), cumulative=True)

    def check_config(self, config: Any) -> str | None:
        """Refuse optimizers whose updates are not sums of gradients, and clipping of steps."""
        optimizer = config.train.optimizer
        if not optimizer.sums_gradients:
            return f"train.optimizer: must be sgd with fednova, got {optimizer.kind!r}"
        if config.privacy.clip is not None:
            reason = "since numbers of local steps have no bound that is known beforehand"
            return f"privacy.clip: must be null with fednova, {reason}, got {config.privacy.clip}"
        return None

    def exchanges(self, context: Context) -> list[Exchange | Train]:
        """Train with normalized updates."""
        return [Train(make_upload=self.normalize, combine=self.rescale)]

    @stacked
    def normalize(self, clients: list[Client], local: LocalUpdate) -> ClientResult:
        """Send D_i / a_i and a_i of each client."""
        steps = torch.tensor([effective_steps(client) for client in clients])
        update = {name: d / per_client(steps, d) for name, d in local.update.items()}
        return ClientResult({"update": Sum(update), "steps": Sum({"steps": steps})})

    def rescale(self, server: Server, uploads: CollectedUploads, context: Context) -> Tensors:
        """Return (sum_i p_i a_i) sum_i p_i D_i / a_i."""
        steps = float(uploads.mean("steps")["steps"])
        return {name: steps * value for name, value in uploads.mean("update").items()}


def effective_steps(client: Client) -> float:
    """Return a_i: the number of plain SGD steps to which a client's update corresponds."""
    steps, r = client.steps, client.momentum
    return (steps - r * (1 - r**steps) / (1 - r)) / (1 - r)
