"""Gradients of earlier tasks, computed from clients' coresets (STAMP, eq. 3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from perdure.contract.context import Client
from perdure.contract.step import Batch, cross_entropy_rows, masked_mean
from perdure.core.trees import Tensors
from perdure.methods.parts.coreset_memory import StackedCoresets, coreset_active_outputs
from perdure.models.forward_pass import ForwardPass
from perdure.models.network import Network

Gradients = Literal["prototype", "sample"]
"""Whether the loss of an earlier task is that of its class prototypes or of its stored examples."""


@dataclass(frozen=True)
class CoresetLoss:
    """The loss of one past task (eq. 3): the mean over classes c of CE(f(p_c), c).

    p_c is the mean feature of the stored examples of class c. With `gradients: sample` the loss is
    the mean over all stored examples instead.
    """

    network: Network
    """The network with the outputs so far."""
    fwd: ForwardPass
    """Circumstances of the forward pass."""
    gradients: Gradients
    """`prototype` or `sample`."""

    def __call__(
        self, params: Tensors, x: Tensor, y: Tensor, count: Tensor, active: Tensor | None = None
    ) -> Tensor:
        """Return the loss, a scalar.

        Args:
            params: All parameters.
            x: [classes, examples, ...]. Stored examples, padded at the end.
            y: int64 [classes]. Output of each class.
            count: int64 [classes]. Examples that are not padding.
            active: bool [outputs]. Active outputs. If None, all.
        """
        real = (torch.arange(x.shape[1], device=x.device) < count.unsqueeze(1)).to(x.dtype)
        features = self.network.features(params, x.flatten(0, 1), self.fwd)
        if self.gradients == "sample":
            targets, weight = y.repeat_interleave(x.shape[1]), real.flatten()
        else:
            sums = (features.view(*real.shape, -1) * real.unsqueeze(2)).sum(1)
            features = sums / count.clamp(min=1).unsqueeze(1)
            targets, weight = y, (count > 0).to(x.dtype)
        logits = self.network.classify(params, features, self.fwd)
        return masked_mean(cross_entropy_rows(logits, Batch(x, targets, weight, active)), weight)


def past_task_steps(
    clients: list[Client], update: Tensors, past: StackedCoresets, gradients: Gradients
) -> Tensors:
    """Return minus lr times the gradients of past tasks at theta_u^E, [clients, tasks, ...].

    All clients and tasks are computed in one vmapped pass.

    Args:
        clients: Clients with equally many past tasks.
        update: theta_u^E - theta by parameter name, with a leading client axis.
        past: Their coresets.
        gradients: Whether the losses use prototypes or every stored example.
    """
    client, lead, active = clients[0], past.y.shape[:2], coreset_active_outputs(clients, past)
    fwd = ForwardPass(buffers=client.buffers, stacked=True)
    task_loss = CoresetLoss(client.context.network, fwd, gradients)
    leaves = {
        name: (client.params[name] + value).repeat_interleave(lead[1], 0).requires_grad_()
        for name, value in update.items()
    }

    def loss(params: Tensors, *arguments: Tensor) -> Tensor:
        return task_loss(client.params | params, *arguments)

    arguments = [past.x, past.y, past.count, *([] if active is None else [active])]
    with torch.enable_grad():
        losses = torch.vmap(loss)(leaves, *(value.flatten(0, 1) for value in arguments))
    grads = torch.autograd.grad(losses.sum(), list(leaves.values()), materialize_grads=True)
    return {
        name: g.view(*lead, *g.shape[1:]) * -client.context.lr
        for name, g in zip(leaves, grads, strict=True)
    }
