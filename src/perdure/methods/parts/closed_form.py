"""Classifiers in closed form from sums over examples: no gradient steps, nothing is forgotten.

At a task's end every client sends, for the examples of the task, the count and the total of each
class's inputs and their Gram matrix, as one `Sum`. The server adds them to those of earlier tasks.
Since all of it is sums, the classifier is that of all examples together, whatever the order of
tasks and clients.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from perdure.algebra.class_statistics import LinearHead, class_totals
from perdure.contract.context import Client, Context, Server
from perdure.contract.exchanges import Exchange, Train
from perdure.contract.method import Method
from perdure.contract.needs import Needs
from perdure.contract.uploads import ClientResult, CollectedUploads, Sum
from perdure.core.trees import Tensors
from perdure.methods.parts.missing_statistics import (
    counts_of_task,
    warn_nothing_sent,
    warn_of_missing_classes,
)
from perdure.models.network import Network


@dataclass(frozen=True)
class ClassSums:
    """Server state: sums over the examples of all tasks so far."""

    count: Tensor | None = None
    """double [outputs]: examples of each output."""
    total: Tensor | None = None
    """double [outputs, D]: sum of their inputs."""
    gram: Tensor | None = None
    """double [D, D]: sum of x x^T over all examples; None if the method does not need it."""

    def plus(self, new: Tensors) -> ClassSums:
        """Return these sums and those of more examples; outputs that are new begin at 0."""
        if self.count is None or self.total is None:
            return ClassSums(new["count"], new["total"], new.get("gram"))
        grown = len(new["count"]) - len(self.count)
        count = F.pad(self.count, (0, grown)) + new["count"]
        total = F.pad(self.total, (0, 0, 0, grown)) + new["total"]
        return ClassSums(count, total, None if self.gram is None else self.gram + new["gram"])


@dataclass(frozen=True)
class ClosedForm(Method):
    """A classifier that follows from class sums; a subclass says how."""

    inputs: Literal["features", "raw"] = "features"
    """`features`: the head's inputs. `raw`: the normalized examples themselves, flattened."""
    train_first: bool = False
    """Whether the network is trained by FedAvg in the first task; its features are frozen then."""

    ServerState: ClassVar[type] = ClassSums
    needs_gram: ClassVar[bool] = True
    needs_classes: ClassVar[bool] = True
    kind: ClassVar[str] = "closed form"
    """Name in the registry."""

    @property
    def needs(self) -> Needs:
        """What it needs: all class sums at prediction."""
        state = ("count", "total", "gram")
        return Needs(classes=self.needs_classes, prediction_state=state)

    def check_config(self, config: Any) -> str | None:
        """Return why it cannot run: token ids have no mean."""
        if self.inputs == "raw" and config.model.kind == "text":
            return "method.inputs: must be 'features' with model.kind 'text', got 'raw'"
        return None

    def exchanges(self, context: Context) -> list[Exchange | Train]:
        """Train in the first task if asked to; gather the sums at every task's end."""
        trains = self.train_first and context.task == 0
        sums = Exchange("sums", client_work=self.add_up, aggregate=self.gather)
        return [Train(rounds=None if trains else 0), sums]

    def add_up(self, client: Client) -> ClientResult:
        """Return the sums over the client's examples, but for classes with too few of them."""
        client = client.without_small_classes()
        outputs = client.context.network.outputs.count(client.context.task)
        parts = [self._sums_of(client, batch, outputs) for batch in client.data.batches()]
        totals = {name: torch.stack([part[name] for part in parts]).sum(0) for name in parts[0]}
        return ClientResult({"sums": Sum(totals, weight=1.0)})

    def _sums_of(self, client: Client, batch: Any, outputs: int) -> Tensors:
        rows = batch.x.flatten(1) if self.inputs == "raw" else client.features(batch)
        count, total = class_totals(rows, batch.y, outputs)
        sums = {"count": count, "total": total}
        return sums | {"gram": rows.double().T @ rows.double()} if self.needs_gram else sums

    def gather(self, server: Server, uploads: CollectedUploads, context: Context) -> Server:
        """Add the clients' sums to those of earlier tasks."""
        sums = uploads.total("sums") if uploads.has("sums") else None
        if sums is None or not sums["count"].sum():
            warn_nothing_sent(self.kind, context, "none of its classes can be predicted")
            return server
        if not context.network.outputs.is_number:
            warn_of_missing_classes(self.kind, context, counts_of_task(sums["count"], context))
        return replace(server, state=server.state.plus(sums))

    @abstractmethod
    def head(self, sums: ClassSums) -> LinearHead:
        """Return the classifier of these sums."""

    def predict_features(
        self, server: Server, x: Tensor, network: Network,
        client_state: Any = None, task: int | None = None,
    ) -> Tensor:  # fmt: skip
        """Return the classifier's inputs: features of the network, or the examples themselves."""
        return (
            x.flatten(1) if self.inputs == "raw" else super().predict_features(server, x, network)
        )

    def predict_from_features(
        self, server: Server, features: Tensor, network: Network,
        client_state: Any = None, task: int | None = None,
    ) -> Tensor:  # fmt: skip
        """Return the logits of the closed-form head; the network's own before the first sums."""
        if server.state.count is None and self.inputs == "features":
            return super().predict_from_features(server, features, network)
        if server.state.count is None:
            newest = len(network.outputs.task_classes) - 1
            return features.new_zeros(len(features), network.outputs.count(newest))
        logits = self.head(server.state).logits(features)
        return logits[:, :1] if network.outputs.is_number else logits
