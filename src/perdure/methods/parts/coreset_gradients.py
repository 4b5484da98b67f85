"""Gradients of earlier tasks, computed from clients' coresets (STAMP, eq. 3)."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from perdure.contract.context import Client
from perdure.contract.step import Batch, masked_mean, target_losses
from perdure.core.trees import Tensors, pad_stack
from perdure.methods.parts.replay import (
    StoredExamples,
    example_shape,
    model_inputs,
    past_active_outputs,
)
from perdure.models.forward_pass import ForwardPass
from perdure.models.network import Network

Gradients = Literal["sample", "prototype"]
"""Whether the loss of an earlier task is that of its stored examples or of its class prototypes."""


@dataclass(frozen=True)
class StackedCoresets:
    """The coresets of several clients with equally many past tasks, padded to one shape."""

    x: Tensor
    """float [clients, tasks, examples, *shape] (int32 for tokens): inputs of the model."""
    y: Tensor
    """int64 [clients, tasks, examples]: output index."""
    mask: Tensor
    """float32 [clients, tasks, examples]: 1 for an example, 0 for padding."""
    active_outputs: Tensor | None = None
    """bool [clients, tasks, outputs]: the outputs included in the loss. If None, all."""

    def tensors(self) -> list[Tensor]:
        """Return all that is not None, with clients and tasks as one axis."""
        values = (self.x, self.y, self.mask, self.active_outputs)
        return [value.flatten(0, 1) for value in values if value is not None]


def group_by_past_tasks(clients: list[Client]) -> list[list[int]]:
    """Return positions of clients, grouped by their number of past tasks, without those of 0."""
    groups: dict[int, list[int]] = defaultdict(list)
    for position, client in enumerate(clients):
        groups[len(stored_tasks(client))].append(position)
    return [rows for tasks, rows in sorted(groups.items()) if tasks]


def stored_tasks(client: Client) -> list[int]:
    """Return the tasks of the client's stored examples, as indices into its memory."""
    examples: StoredExamples | None = client.state.examples
    return [] if examples is None else sorted(set(examples.tasks.tolist()))


def stack_coresets(clients: list[Client]) -> StackedCoresets:
    """Return the coresets of clients with equally many past tasks as one stack."""
    entries = [_task_entry(client, task) for client in clients for task in stored_tasks(client)]
    x, y, mask = (pad_stack(list(values)) for values in zip(*entries, strict=True))
    x, y, mask = (stack.view(len(clients), -1, *stack.shape[1:]) for stack in (x, y, mask))
    return StackedCoresets(x, y, mask, coreset_active_outputs(clients))


def _task_entry(client: Client, task: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return x, y and mask of one task's stored examples."""
    examples: StoredExamples = client.state.examples
    positions = (examples.tasks == task).nonzero().squeeze(1)
    x = model_inputs(examples, positions, example_shape(client.data))
    return x, examples.targets[positions], torch.ones(len(positions), device=x.device)


def coreset_active_outputs(clients: list[Client]) -> Tensor | None:
    """Return the active outputs of each past task, bool [clients, tasks, outputs].

    They follow those of training: all outputs (None), those seen so far, or those of one task.
    """
    masks = list[Tensor]()
    for client in clients:
        past, current = client.state.examples.active_outputs, client.data.active_outputs
        if past is None or current is None:
            return None
        masks.append(past_active_outputs(past[stored_tasks(client)], current))
    return torch.stack(masks)


@dataclass(frozen=True)
class CoresetLoss:
    """The loss of one past task: the mean cross-entropy of its stored examples.

    With `gradients: prototype` it is eq. 3: the mean over classes c of CE(f(p_c), c), where p_c is
    the mean feature of the stored examples of class c.
    """

    network: Network
    """The network with the outputs so far."""
    fwd: ForwardPass
    """Circumstances of the forward pass."""
    gradients: Gradients
    """`sample` or `prototype`."""

    def __call__(
        self, params: Tensors, x: Tensor, y: Tensor, mask: Tensor, active: Tensor | None = None
    ) -> Tensor:
        """Return the loss, a scalar.

        Args:
            params: All parameters.
            x: [examples, *shape]. Stored examples.
            y: int64 [examples]. Output of each.
            mask: float [examples]. 1 for an example, 0 for padding.
            active: bool [outputs]. Active outputs. If None, all.
        """
        features = self.network.features(params, x, self.fwd)
        if self.gradients == "prototype":  # p_c for each example, of which a class counts once
            same_class = (y.unsqueeze(0) == y.unsqueeze(1)) * mask
            class_size = same_class.sum(1).clamp(min=1)
            features = same_class @ features / class_size.unsqueeze(1)
            mask = mask / class_size
        logits = self.network.classify(params, features, self.fwd)
        return masked_mean(target_losses(logits, Batch(x, y, mask, active)), mask)


def past_task_steps(clients: list[Client], update: Tensors, gradients: Gradients) -> Tensors:
    """Return minus lr times the gradients of past tasks at theta_u^E, [clients, tasks, ...].

    All clients and tasks are computed in one vmapped pass.

    Args:
        clients: Clients with equally many past tasks.
        update: theta_u^E - theta by parameter name, with a leading client axis.
        gradients: Whether the losses use every stored example or prototypes.
    """
    client, past = clients[0], stack_coresets(clients)
    lead = past.y.shape[:2]
    fwd = ForwardPass(buffers=client.buffers, stacked=True)
    task_loss = CoresetLoss(client.context.network, fwd, gradients)
    leaves = {
        name: (client.params[name] + value).repeat_interleave(lead[1], 0).requires_grad_()
        for name, value in update.items()
    }

    def loss(params: Tensors, *arguments: Tensor) -> Tensor:
        return task_loss(client.params | params, *arguments)

    with torch.enable_grad():
        losses = torch.vmap(loss)(leaves, *past.tensors())
    grads = torch.autograd.grad(losses.sum(), list(leaves.values()), materialize_grads=True)
    return {
        name: g.view(*lead, *g.shape[1:]) * -client.context.lr
        for name, g in zip(leaves, grads, strict=True)
    }
