"""Task identity from Gaussians of classes: beyond FedProTIP's paper, as an option.

At a task's end clients send counts, totals and Gram matrices of their classes' features, as sums. A
class is a Gaussian whose covariance is half its own and half the one that all classes share; a
task's density is the mixture of its classes'. A row belongs to the task of the largest density, a
batch of one task to that of the largest product of densities.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from perdure.algebra.class_statistics import quadratic_logits, shrink
from perdure.contract import Client, ClientResult, CollectedUploads, Context, Exchange, Server, Sum
from perdure.core.trees import Tensors
from perdure.methods.parts.class_gaussians import ClassGaussians, client_class_sums
from perdure.models.outputs import Outputs

_SHRINKAGE = 0.1


def gaussians_exchange() -> Exchange:
    """Return the exchange that adds the task's classes to `server.state.gaussians`."""
    return Exchange("gaussians", client_work=send_class_sums, aggregate=gather_gaussians)


def send_class_sums(client: Client) -> ClientResult:
    """Send the sums of each class's features."""
    return ClientResult({"gaussians": Sum(client_class_sums(client, per_class=True), weight=1.0)})


def gather_gaussians(server: Server, uploads: CollectedUploads, context: Context) -> Server:
    """Join the task's Gaussians with the earlier ones."""
    new, old = ClassGaussians.from_sums(uploads.total("gaussians")), server.state.gaussians
    joined = ClassGaussians.read(old).merged(new) if old else new
    return replace(server, state=replace(server.state, gaussians=joined.tree()))


def task_log_densities(features: Tensor, gaussians: Tensors, outputs: Outputs) -> Tensor:
    """Return the log-density of each row under each task, double [rows, tasks].

    Args:
        features: Float [rows, D].
        gaussians: `ClassGaussians.tree()` of the outputs so far.
        outputs: Which outputs belong to which task.
    """
    classes = ClassGaussians.read(gaussians)
    covariances = shrink((classes.covariance + classes.shared_covariance()) / 2, _SHRINKAGE)
    logits = quadratic_logits(features, classes.count, classes.mean, covariances)
    newest = len(outputs.task_classes) - 1
    masks = torch.stack([outputs.task_mask(task, newest) for task in range(newest + 1)])
    masked = logits.unsqueeze(1).masked_fill(~masks.to(logits.device), -torch.inf)
    return masked.logsumexp(2)


def likeliest_task(densities: Tensor, batch: int | None = None) -> Tensor:
    """Return the task of each row, int64 [rows].

    Args:
        densities: Log-densities [rows, tasks].
        batch: If given, consecutive batches of so many rows are of one task each.
    """
    if batch is not None:
        sums = [part.sum(0).expand_as(part) for part in torch.split(densities, batch)]
        densities = torch.cat(sums)
    return densities.argmax(1)
