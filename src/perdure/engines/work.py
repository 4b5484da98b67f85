"""One client's local work, as both engines do it: which batches, which loss, which gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from perdure.config import Config, TrainConfig
from perdure.data.tasks import Stream, Task
from perdure.engines.optimizers import coupled_decay
from perdure.federation.evaluation import Judge, Scores
from perdure.federation.messages import Answers, Failure, Sealed
from perdure.methods.base import Batch, Client, Finish, Method, Net, Place, overrides
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
    """`params`, what the method broadcast, and what clients derive from it."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "received", self.received | self.method.derive(self.received))

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
            guards=self.guards(received),
        )
        network = self.place.network.knowing(batch.known)
        net, full = Net(network, run), self.full(params, received)
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
            done = self.guards(received)
            rest = {name: g for name, g in grads.items() if name not in done}
            changed = self.method.gradient(rest, self.full(params, received), received, own)
            grads = {name: changed.get(name, g) for name, g in grads.items()}
        if self.train.clip is not None:
            grads = clipped(grads, self.train.clip)
        return grads

    def guards(self, received: Tree) -> dict[str, Tensors]:
        """Spaces to be kept out of weight gradients on the side of the layers' inputs.

        That is cheaper where a batch has fewer rows than a weight, and right where the gradient
        comes from the loss of the layers' outputs alone.
        """
        if not self.method.has_own("guards"):
            return {}
        if coupled_decay(self.train) or any(overrides(self.method, n) for n in ("loss", "penalty")):
            return {}
        found, small = self.method.guards(received), self.train.batch_size
        return {
            name: space
            for name, space in found.items()
            if self.params[name].dim() == 2 and len(self.params[name]) > small
        }

    @cached_property
    def settles(self) -> bool:
        """Whether the method has a say after each optimiser step."""
        return self.method.settles(self.train.optimizer)

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


@dataclass(frozen=True)
class Plan:
    """The batches of a client's local steps, as row numbers of the task's training set."""

    rows: Tensor
    """int64 [steps, batch]; a batch that is not full is padded with a row of the client."""
    sizes: list[int]
    """Real rows of each batch."""
    epochs: Tensor
    """int64 [steps]: which epoch each belongs to, from 0."""

    def __len__(self) -> int:
        return len(self.sizes)

    def __iter__(self) -> Iterator[Tensor]:
        for rows, size in zip(self.rows, self.sizes, strict=True):
            yield rows if size == len(rows) else rows[:size]


def batch_plan(client: Client, train: TrainConfig) -> Plan:
    """Shuffle a client's rows anew in every epoch and cut them into batches."""
    generator, index, size = client.draw("batches"), client.shard.index, train.batch_size
    steps, left = -(-len(index) // size), len(index) % size or size
    epochs = train.local_epochs
    if train.max_steps is not None:
        epochs = min(epochs, -(-train.max_steps // steps))
    rows = index[:1].expand(epochs, steps * size).clone()
    for epoch in range(epochs):
        order = torch.randperm(len(index), generator=generator)
        rows[epoch, : len(index)] = index[order.to(index.device)]
    sizes = ([size] * (steps - 1) + [left]) * epochs
    numbers = torch.arange(epochs, device=index.device).repeat_interleave(steps)
    cap = train.max_steps
    return Plan(rows.view(epochs * steps, size)[:cap], sizes[:cap], numbers[:cap])


def noise_key(client: Client) -> int:
    """Where a client's dropout noise of this round begins; one number a step follows."""
    place = client.place
    return place.draws.key("dropout", place.task, place.round, client.id) >> 1


class Engine(Protocol):
    """Runs all that is done with clients' data: local work, extra rounds, tests."""

    @property
    def name(self) -> str:
        """Its kind, as result.json says it."""
        ...

    def stream(self, config: Config) -> Stream | None:
        """The stream where only clients hold its data; None: this process reads it."""
        ...

    def train(
        self, job: Job, clients: list[Client], keep: Keep
    ) -> Iterator[Answers | Sealed | Failure]:
        """Train every client and yield the uploads in the order of `clients`.

        `keep(client, state)` is called for each client that has something new to keep.
        """
        ...

    def extract(
        self, method: Method, clients: Iterable[Client]
    ) -> Iterator[tuple[Client, Finish | Sealed | Failure]]:
        """The extra round at a task's end: what each client sends and keeps, in their order."""
        ...

    def score(self, judge: Judge, tasks: list[Task]) -> list[Scores]:
        """How good a model is on the test data of some tasks."""
        ...

    def choice(self) -> Tree:
        """What it found out on the way that a resumed run needs to go on alike."""
        ...

    def restore(self, choice: Tree) -> None:
        """Take up the choice of an earlier process."""
        ...


class Local:
    """What engines have in common that hold the data of all clients themselves."""

    def stream(self, config: Config) -> Stream | None:
        """None: read what the config names."""
        return None

    def extract(
        self, method: Method, clients: Iterable[Client]
    ) -> Iterator[tuple[Client, Finish | Sealed | Failure]]:
        """One client after another; `clients` may be made one by one."""
        for client in clients:
            yield client, method.extract(client)

    def score(self, judge: Judge, tasks: list[Task]) -> list[Scores]:
        """Score task after task."""
        return [judge.score(task) for task in tasks]

    def choice(self) -> Tree:
        """Nothing."""
        return {}

    def restore(self, choice: Tree) -> None:
        """Nothing to take up."""
