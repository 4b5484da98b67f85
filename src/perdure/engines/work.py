"""One client's local work, as both engines do it: which batches, which loss, which gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from perdure.config import TrainConfig
from perdure.engines.optimizers import coupled_decay
from perdure.federation.messages import Answers
from perdure.methods.base import Batch, Client, Method, Net, Place, overrides
from perdure.models.passes import Pass
from perdure.trees import Tensors, Tree

Keep = Callable[[int, Tree], None]


@dataclass(frozen=True)
class Job:
    """What all clients of a round have in common."""

    method: Method
    place: Place
    train: TrainConfig
    params: Tensors
    buffers: Tensors
    received: Tree
    """`params` and what the method broadcast."""

    @cached_property
    def trainable(self) -> tuple[str, ...]:
        """Names of the parameters that are trained."""
        return self.method.trainable(self.params, self.place)

    def full(self, params: Tensors, received: Tree) -> Tensors:
        """All parameters: the trained ones, and the others as they were received."""
        return {**received["params"], **params}

    @cached_property
    def batch_statistics(self) -> bool:
        """Whether batch norm works with the statistics of a batch."""
        return self.method.batch_statistics(self.place)

    def loss(
        self,
        params: Tensors,
        buffers: Tensors,
        batch: Batch,
        key: Tensor,
        received: Tree,
        own: Tensors,
        lifted: bool = False,
    ) -> tuple[Tensor, Tensors]:
        """Loss of one batch and the new running statistics. `params` are the trained ones."""
        run = Pass(
            train=True,
            buffers=buffers,
            batch_statistics=self.batch_statistics,
            key=key,
            mask=batch.mask,
            lifted=lifted,
        )
        net, full = Net(self.place.network, run), self.full(params, received)
        loss = self.method.loss(net, full, batch, received, own)
        if overrides(self.method, "penalty"):
            loss = loss + self.method.penalty(net, full, batch, received, own)
        return loss, run.updates

    def direction(self, grads: Tensors, params: Tensors, received: Tree, own: Tensors) -> Tensors:
        """The gradient as the optimiser gets it: weight decay, the method's change, clipping."""
        decay = coupled_decay(self.train)
        if decay:
            grads = {name: g.add(params[name], alpha=decay) for name, g in grads.items()}
        if overrides(self.method, "gradient"):
            grads = self.method.gradient(grads, self.full(params, received), received, own)
        if self.train.clip is not None:
            grads = clipped(grads, self.train.clip)
        return grads

    @cached_property
    def changes_gradient(self) -> bool:
        """Whether `direction` does anything."""
        decay = coupled_decay(self.train)
        return bool(decay or overrides(self.method, "gradient") or self.train.clip is not None)


def clipped(grads: Tensors, limit: float) -> Tensors:
    """The gradients, scaled down to a total norm of at most `limit`."""
    squares = torch.stack([g.square().sum() for g in grads.values()])
    factor = (limit / (squares.sum().sqrt() + 1e-6)).clamp(max=1.0)
    return {name: g * factor for name, g in grads.items()}


def batch_plan(client: Client, train: TrainConfig) -> list[Tensor]:
    """Row numbers of each local step of a client: shuffled anew in every epoch."""
    generator = client.draw("batches")
    index, plan = client.shard.index, list[Tensor]()
    for _ in range(train.local_epochs):
        order = torch.randperm(len(index), generator=generator)
        plan += index[order.to(index.device)].split(train.batch_size)
    return plan[: train.max_steps]


def noise_key(client: Client) -> int:
    """Where a client's dropout noise of this round begins; one number a step follows."""
    place = client.place
    return place.draws.key("dropout", place.task, place.round, client.id) >> 1


class Engine(Protocol):
    """Runs the local work of a round's clients."""

    name: str

    def train(self, job: Job, clients: list[Client], keep: Keep) -> Iterator[Answers]:
        """Train every client and yield the uploads in the order of `clients`.

        `keep(client, state)` is called for each client that has something new to keep.
        """
        ...
