"""The serial engine: the reference implementation, which trains one client after another."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from perdure.config import Config
from perdure.config.engine import EngineConfig
from perdure.contract.context import Client
from perdure.contract.exchanges import is_stacked
from perdure.contract.uploads import LocalUpdate, StackedUploads, stack_of_one
from perdure.core.trees import Tensors, subtract
from perdure.training.engines.engine import InProcessEngine
from perdure.training.local_training import (
    LocalTraining,
    SaveClient,
    Transforms,
    augmentation_draws,
    augmented,
    batch_schedule,
    first_dropout_seed,
)
from perdure.training.optimizers import make_optimizer


class SerialEngineConfig(EngineConfig):
    """Clients train one after another.

    Example: `engine: {kind: serial}`
    """

    def make(self, config: Config) -> SerialEngine:
        """Return the engine."""
        return SerialEngine()


class SerialEngine(InProcessEngine):
    """Trains clients one by one with ordinary autograd."""

    name = "serial"

    def train(
        self, training: LocalTraining, clients: list[Client], save_client: SaveClient
    ) -> Iterator[StackedUploads]:
        """Train every client and yield its upload."""
        for client in clients:
            params, buffers = train_client(training, client)
            yield upload_client(training, client, params, buffers, save_client)


def train_client(training: LocalTraining, client: Client) -> tuple[Tensors, Tensors]:
    """Take the local steps of one client; return its trained parameters and running statistics."""
    names, local = training.trainable, training.prepare_client(client)
    initial = training.params | local.initial_params
    leaves = [initial[name].clone().requires_grad_() for name in names]
    params, buffers = dict(zip(names, leaves, strict=True)), training.buffers
    optimizer, lr = make_optimizer(training.train_config), training.context.lr
    changes_raw_gradient = training.changes_raw_gradient(local.transforms)
    step_transforms: Transforms = ()
    if local.transforms:
        positions = training.step_transforms(local.transforms)
        step_transforms = tuple(local.transforms[position] for position in positions)
    schedule = batch_schedule(client, training.train_config)
    keys = first_dropout_seed(client) + torch.arange(len(schedule.sizes))
    draws = None
    if training.augmentation is not None:
        draws = augmentation_draws(training, client, *schedule.rows.shape)
    total = torch.zeros(())
    for step, (rows, epoch, key) in enumerate(zip(schedule, schedule.epochs, keys, strict=True)):
        batch = client.data.batch(rows, local_epoch=epoch)
        if draws is not None:
            batch = augmented(training, client, batch, draws[step])
        loss, new_buffers = training.loss(params, buffers, batch, key, training.broadcast, local)
        grads, total = gradients(loss, leaves), total + loss.detach().cpu()
        with torch.no_grad():
            if changes_raw_gradient:
                named = dict(zip(names, grads, strict=True))
                named = training.decay_transform_clip(
                    named, params, training.broadcast, local.transforms
                )
                grads = list(named.values())
            before: Tensors = {}
            if step_transforms:
                before = {name: p.detach().clone() for name, p in params.items()}
            optimizer.step(leaves, grads, lr)
            if step_transforms:
                _transform_step(params, before, step_transforms, lr)
        if new_buffers:
            buffers = buffers | {name: value.detach() for name, value in new_buffers.items()}
    training.losses[client.id] = client.weight, float(total) / max(len(keys), 1)
    return {name: leaf.detach() for name, leaf in params.items()}, buffers


def gradients(loss: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    """Return the gradient of each leaf, zero for leaves that the loss does not depend on."""
    grads: list[Tensor | None] = list(torch.autograd.grad(loss, leaves, allow_unused=True))
    return [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads, strict=True)]


def _transform_step(params: Tensors, before: Tensors, transforms: Transforms, lr: float) -> None:
    for transform in transforms:
        for name, value in transform.on_step(params, before, lr).items():
            if value is not params[name]:
                params[name].copy_(value)


def upload_client(
    training: LocalTraining,
    client: Client,
    params: Tensors,
    buffers: Tensors,
    save_client: SaveClient,
) -> StackedUploads:
    """Return a trained client's upload, and save its state and private parameters."""
    private = {name: params[name] for name in training.train.private}
    update = subtract({name: params[name] for name in training.sent}, training.params)
    local = LocalUpdate(update, subtract(buffers, training.buffers))
    make_upload = training.train.make_upload
    if make_upload is not None and is_stacked(make_upload):
        fields, states = training.make_upload([client], local.as_stack())
        uploads = StackedUploads((client.id,), (client.weight,), fields)
        state = states and states[0]
    else:
        fields, state = training.make_upload(client, local)
        uploads = stack_of_one(client.id, client.weight, fields)
    if state is not None or private:
        save_client(client.id, state, private)
    return uploads
