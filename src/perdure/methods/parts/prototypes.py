"""Prototypes of classes as further inputs of the head, next to the features of a batch (PIP)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from perdure.algebra.class_statistics import Gaussians, draw_around
from perdure.contract.context import Client, Context, Server
from perdure.contract.step import Step
from perdure.core.trees import Tensors
from perdure.methods.parts.prompting import prompted_features, task_slot
from perdure.models.ops import ForwardPass


def no_prototypes(server: Server, context: Context) -> Gaussians:
    """Return Z_G = {}: classes of the task without a prototype are zero and do not count."""
    classes = len(context.network.outputs.task_classes[context.task])
    device = next(iter(server.params.values())).device
    return Gaussians.empty(classes, context.network.feature_size, device)


def augment_prototypes(client: Client, shared: Tensors, copies: int, both_sides: bool) -> Tensors:
    """Return the prototypes of each epoch with their augmentations (PIP, eq. 11), and labels.

    Returns:
        `points` float [epochs, (1 + copies) * classes, D] and `labels` int64, of all classes that
        have a prototype.

    """
    device = client.data.index.device
    shared = {name: value.to(device) for name, value in shared.items()}
    prototypes = Gaussians(**{"variance": torch.zeros_like(shared["mean"]), **shared})
    present, generator = prototypes.there > 0, client.secret("augment")
    epochs = [
        draw_around(prototypes, copies, both_sides, generator)[:, present]
        for _ in range(client.epochs)
    ]
    labels = task_outputs(client)[present].repeat(1 + copies)
    return {"points": torch.stack(epochs).flatten(1, 2), "labels": labels}


def inject_prototypes(features: Tensor, step: Step) -> tuple[Tensor, Step]:
    """Return head inputs and step, with the epoch's prototypes added as further rows.

    Args:
        features: float [rows, feature size]. Head inputs of the batch.
        step: The local step, with the tensors of `augment_prototypes`.

    """
    batch, points, labels = step.batch, step.tensors["points"], step.tensors["labels"]
    epoch = torch.zeros_like(labels[:1]) if batch.epoch is None else batch.epoch.reshape(1)
    points = points.index_select(0, epoch).squeeze(0)
    mask = batch.mask
    if mask is not None:
        mask = torch.cat([mask, torch.ones_like(labels, dtype=mask.dtype)])
    joined = replace(batch, y=torch.cat([batch.y, labels]), mask=mask)
    return torch.cat([features, points]), replace(step, batch=joined)


def class_moments(client: Client, params: Tensors) -> Gaussians:
    """Return the mean and biased variance of each class's head inputs (PIP, eqs. 7 and 8)."""
    network, slot = client.context.network, task_slot(client).get("slot")
    outputs, rows, labels = task_outputs(client), [], []
    if not len(client.data):
        return Gaussians.empty(len(outputs), network.feature_size, outputs.device)
    with torch.no_grad():
        for batch in client.data.batches():
            known = network.with_cached_features(batch.cached_features)
            rows.append(prompted_features(known, params, batch.x, slot, ForwardPass())[0])
            labels.append(torch.searchsorted(outputs, batch.y))
    return Gaussians.of(torch.cat(rows), torch.cat(labels), len(outputs))


def task_outputs(client: Client) -> Tensor:
    """Return the outputs of the task's classes, int64 [classes]."""
    outputs, task = client.context.network.outputs, client.context.task
    classes = torch.tensor(outputs.task_classes[task])
    return outputs.targets(task)[classes].to(client.data.index.device)
