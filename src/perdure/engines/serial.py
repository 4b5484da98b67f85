"""The plain reference: one client after another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from perdure.engines.optimizers import make_optimizer
from perdure.engines.work import Job, Keep, Local, batch_plan, noise_key
from perdure.federation.messages import Answers, single
from perdure.methods.base import Client
from perdure.trees import Tensors, subtract


class SerialEngine(Local):
    """Trains clients one by one with ordinary autograd."""

    name = "serial"

    def train(self, job: Job, clients: list[Client], keep: Keep) -> Iterator[Answers]:
        """Train every client and yield its upload."""
        for client in clients:
            params, buffers = train_client(job, client)
            yield finish_client(job, client, params, buffers, keep)


def train_client(job: Job, client: Client) -> tuple[Tensors, Tensors]:
    """The local steps of one client: the trained parameters and the running statistics."""
    names = job.trainable
    first = job.params | job.method.starting(client)
    leaves = [first[name].clone().requires_grad_() for name in names]
    params, buffers = dict(zip(names, leaves, strict=True)), job.buffers
    optimizer, own = make_optimizer(job.train), job.method.prepare(client)
    settles, lr = job.settles, job.place.lr
    plan = batch_plan(client, job.train)
    keys = noise_key(client) + torch.arange(len(plan))
    for rows, epoch, key in zip(plan, plan.epochs, keys, strict=True):
        batch = replace(client.shard.batch(rows), epoch=epoch)
        loss, updates = job.loss(params, buffers, batch, key, job.received, own)
        grads = gradients(loss, leaves)
        with torch.no_grad():
            if job.changes_gradient:
                named = dict(zip(names, grads, strict=True))
                grads = list(job.direction(named, params, job.received, own).values())
            before = {n: p.detach().clone() for n, p in params.items()} if settles else {}
            optimizer.step(leaves, grads, lr, None)
            if settles:
                _assign(params, job.method.settle(params, before, job.received, own, lr))
        if updates:
            buffers = buffers | {name: value.detach() for name, value in updates.items()}
    return {name: leaf.detach() for name, leaf in params.items()}, buffers


def gradients(loss: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    """The gradient of each leaf, zero for those that the loss does not depend on."""
    found: list[Tensor | None] = list(torch.autograd.grad(loss, leaves, allow_unused=True))
    return [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)]


def _assign(params: Tensors, values: Tensors) -> None:
    for name, value in values.items():
        params[name].copy_(value)


def finish_client(
    job: Job, client: Client, params: Tensors, buffers: Tensors, keep: Keep
) -> Answers:
    """Let the method say what a client sends and keeps."""
    update = subtract(params, job.params)
    done = job.method.finish(client, update, subtract(buffers, job.buffers))
    if done.kept is not None:
        keep(client.id, done.kept)
    return single(client.id, client.weight, done.upload)
