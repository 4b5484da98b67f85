"""Clients stacked and trained together.

A chunk of clients is one stack of tensors with a leading client axis, on which each step is one
function (engines.steps). Unequal client sizes: within a chunk clients are sorted by their number of
steps, so the clients that are still at work are always the first ones of the stack.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from perdure.engines.optimizers import make_optimizer
from perdure.engines.serial import SerialEngine, finish_client
from perdure.engines.steps import Steps
from perdure.engines.work import Job, Keep, Local, Plan, batch_plan, noise_key
from perdure.federation.messages import Answers, Upload
from perdure.methods.base import Client, Method, default_upload, overrides
from perdure.trees import Tensors, Tree, subtract

log = logging.getLogger(__name__)

_WEIGHT_BYTES, _SAVED_BYTES = 21_000_000, 10_000_000
"""Weights and saved activations of a chunk: where larger chunks were measured to be slower, since
the stack no longer fits the cache. Activations are written anew in every step: they count more."""


class VectorEngine(Local):
    """Trains chunks of clients as one stack."""

    name = "vector"

    def __init__(self, chunk: int | None = None) -> None:
        self.chunk = chunk
        self._steps = Steps()
        self._serial: SerialEngine | None = None

    def train(self, job: Job, clients: list[Client], keep: Keep) -> Iterator[Answers]:
        """Train chunk after chunk, in the order of the clients."""
        size = self.chunk or chunk_size(job, clients[0])
        for first in range(0, len(clients), size):
            part = clients[first : first + size]
            yield from self._train_chunk(job, part, keep)

    def choice(self) -> Tree:
        """The chunk, and whether the work could not be vectorised: both show in the bits."""
        return {"chunk": self.chunk, "serial": self._serial is not None}

    def restore(self, choice: Tree) -> None:
        """Go on serially where an earlier process came to that."""
        self._serial = SerialEngine() if choice.get("serial") else None

    def _train_chunk(self, job: Job, clients: list[Client], keep: Keep) -> Iterator[Answers]:
        if self._serial is None:
            try:
                params, buffers = train_stack(job, clients, self._steps)
            except (RuntimeError, NotImplementedError) as error:
                reason = str(error).splitlines()[0] if str(error) else type(error).__name__
                log.warning("this work cannot be vectorised, running it serially: %s", reason)
                self._serial = SerialEngine()
        if self._serial is not None:
            yield from self._serial.train(job, clients, keep)
        else:
            yield from finish_stack(job, clients, params, buffers, keep)


def finish_stack(
    job: Job, clients: list[Client], params: Tensors, buffers: Tensors, keep: Keep
) -> Iterator[Answers]:
    """The uploads of a chunk: stacked where the method sends the default, else one by one."""
    together = type(job.method).finish_all is not Method.finish_all
    if overrides(job.method, "finish") and not together:
        for row, client in enumerate(clients):
            own = {name: value[row] for name, value in params.items()}
            statistics = {name: value[row] for name, value in buffers.items()}
            yield finish_client(job, client, own, statistics, keep)
        return
    update = {name: value.sub_(job.params[name]) for name, value in params.items()}
    statistics = subtract(buffers, job.buffers)
    finish = job.method.finish_all if together else _default
    upload = finish(clients, update, statistics)
    ids, weights = tuple(c.id for c in clients), tuple(c.weight for c in clients)
    yield Answers(ids, weights, upload)


def _default(clients: list[Client], update: Tensors, buffers: Tensors) -> Upload:
    return default_upload(update, buffers)


def chunk_size(job: Job, client: Client) -> int:
    """Clients whose weights and saved activations fit the cache together."""
    leaves = {name: job.params[name].clone().requires_grad_() for name in job.trainable}
    weights, saved = {leaf.data_ptr(): leaf.nbytes for leaf in leaves.values()}, 0
    shared = {tensor.data_ptr() for tensor in job.place.network.constants.values()}

    def count(tensor: Tensor) -> Tensor:
        nonlocal saved
        here = tensor.data_ptr()
        saved += 0 if here in weights or here in shared else tensor.nbytes
        return tensor

    batch = client.shard.batch(client.shard.index[: job.train.batch_size])
    own = job.method.prepare(client)
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        job.loss(leaves, job.buffers, batch, torch.zeros((), dtype=torch.int64), job.received, own)
    fits = min(_WEIGHT_BYTES // max(sum(weights.values()), 1), _SAVED_BYTES // max(saved, 1))
    return max(2, fits)


@dataclass(frozen=True)
class _Schedule:
    """The batches of a chunk: padded to one shape, clients with most steps first."""

    order: list[int]
    """Row of the stack -> place in the chunk."""
    rows: Tensor
    """int64 [steps, clients, batch]"""
    masks: Tensor
    """float [steps, clients, batch]: 1 for a real row."""
    epochs: Tensor
    """int64 [steps, clients]"""
    active: list[int]
    """Clients still at work, for each step."""

    @property
    def back(self) -> Tensor | None:
        """Place in the chunk -> row of the stack; None: they are the same."""
        if self.order == sorted(self.order):
            return None
        return torch.tensor(self.order).argsort()


def make_schedule(plans: list[Plan]) -> _Schedule:
    """Pad the clients' plans to one tensor."""
    order = sorted(range(len(plans)), key=lambda place: -len(plans[place]))
    longest = plans[order[0]]
    # padding is a row of the task: any other row may have no output to answer it
    rows = longest.rows[0, 0].expand(len(longest), len(plans), longest.rows.shape[1]).clone()
    sizes = torch.zeros(len(longest), len(plans), dtype=torch.int64)
    epochs = longest.epochs.unsqueeze(1).repeat(1, len(plans))
    for row, place in enumerate(order):
        plan = plans[place]
        rows[: len(plan), row] = plan.rows
        sizes[: len(plan), row] = torch.tensor(plan.sizes)
        epochs[: len(plan), row] = plan.epochs
    masks = torch.arange(rows.shape[2]) < sizes.unsqueeze(2)
    active = (sizes > 0).sum(1).tolist()
    return _Schedule(order, rows, masks.to(rows.device, torch.float32), epochs, active)


def train_stack(job: Job, clients: list[Client], steps: Steps) -> tuple[Tensors, Tensors]:
    """The local steps of a chunk: stacked parameters and running statistics, in client order."""
    schedule = make_schedule([batch_plan(client, job.train) for client in clients])
    stack = _Stack(job, [clients[place] for place in schedule.order])
    for number, active in enumerate(schedule.active):
        stack.step(steps, schedule, number, active)
    back = schedule.back
    if back is None:
        return stack.params, stack.buffers
    return (
        {name: value[back] for name, value in stack.params.items()},
        {name: value[back] for name, value in stack.buffers.items()},
    )


class _Stack:
    """Stacked clients at work."""

    def __init__(self, job: Job, clients: list[Client]) -> None:
        self.count, first = len(clients), clients[0].shard
        self.job, self.inputs, self.targets = job, first.inputs, first.targets
        self.params = {name: _repeat(job.params[name], self.count) for name in job.trainable}
        for row, client in enumerate(clients):
            for name, value in job.method.starting(client).items():
                self.params[name][row] = value
        self.buffers = {name: _repeat(value, self.count) for name, value in job.buffers.items()}
        self.own = stack_unequal([job.method.prepare(client) for client in clients])
        self.keys = torch.tensor([noise_key(client) for client in clients]).to(first.index.device)
        masks = [client.shard.allowed for client in clients if client.shard.allowed is not None]
        self.allowed = {"allowed": torch.stack(masks)} if masks else {}
        self.optimizer = make_optimizer(job.train)
        self.settles = job.settles

    def step(self, steps: Steps, schedule: _Schedule, number: int, active: int) -> None:
        """One local step of the first `active` clients.

        The lifted step runs on a rounded-up number of clients, so that few shapes are traced;
        what it computes for clients that have finished is not used.
        """
        width = round_up(active, self.count)
        arguments = self._arguments(schedule, number, width)
        grads, updates = steps.run(self.job, self._first(self.params, width), arguments)
        mine = self._first(self.params, active)
        before = {name: p.clone() for name, p in mine.items()} if self.settles else {}
        directions = grads if width == active else [grad[:active] for grad in grads]
        self.optimizer.step(list(mine.values()), directions, self.job.place.lr, active)
        if self.settles:
            self._settle(mine, before, active)
        for name, value in updates.items():
            self.buffers[name][:active] = value[:active]

    def _first(self, stacked: Tensors, width: int) -> Tensors:
        """The first clients of the stack: views."""
        if width == self.count:
            return stacked
        return {name: value[:width] for name, value in stacked.items()}

    def _arguments(self, schedule: _Schedule, number: int, width: int) -> dict[str, Any]:
        rows = schedule.rows[number, :width]
        known = self.inputs.tell(rows)
        return {
            "buffers": self._first(self.buffers, width),
            "x": self.inputs.gather(rows),
            "y": self.targets[rows],
            "mask": schedule.masks[number, :width],
            "epoch": schedule.epochs[number, :width],
            "key": self.keys[:width] + number,
            "own": self._first(self.own, width),
            **self._first(self.allowed, width),
            **({} if known is None else {"known": known}),
        }

    def _settle(self, params: Tensors, before: Tensors, active: int) -> None:
        job = self.job

        def settle(params: Tensors, before: Tensors, own: Tensors) -> Tensors:
            return job.method.settle(params, before, job.received, own, job.place.lr)

        own = self._first(self.own, active)
        for name, value in torch.vmap(settle)(params, before, own).items():
            params[name].copy_(value)


def _repeat(value: Tensor, count: int) -> Tensor:
    return value.detach().expand(count, *value.shape).clone()


def round_up(active: int, most: int) -> int:
    """The next power of two, capped: a chunk of any size has few distinct widths."""
    return min(most, 1 << (active - 1).bit_length())


def stack_unequal(rows: list[Tensors]) -> Tensors:
    """Stack the clients' own tensors; smaller ones are padded with zeros at their end."""
    return {name: _pad_stack([row[name] for row in rows]) for name in rows[0]}


def _pad_stack(values: list[Tensor]) -> Tensor:
    if len({v.dtype for v in values}) > 1:
        raise TypeError(f"prepare gives clients tensors of types {[v.dtype for v in values]}")
    shape = [max(extents) for extents in zip(*(v.shape for v in values), strict=True)]
    stacked = values[0].new_zeros(len(values), *shape)
    for row, value in enumerate(values):
        corner = tuple(slice(extent) for extent in value.shape)
        stacked[row][corner] = value
    return stacked
