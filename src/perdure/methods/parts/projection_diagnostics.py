"""How much projection restricts a new task and protects old ones (FedProTIP, section 5, Figure 2).

rho_t: the fraction of the current task's squared gradient that remains after projection
    (assumption 4).
beta_tau^(t): the fraction of an old task's gradient norm that updates can still reach
    (assumption 5).

Both are computed over the protected weights. Old data is not available when a new task is trained,
so the gradient of task tau is the one at the end of task tau, averaged over clients; the same holds
for rho.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from perdure.contract import Client
from perdure.contract.step import target_losses
from perdure.contract.transforms import project_out_all
from perdure.core.trees import Tensors
from perdure.methods.parts.protected_layers import Subspaces
from perdure.models.layers import Layer


@dataclass(frozen=True)
class ProjectionRecord:
    """rho and beta of the tasks so far."""

    rho: list[float] = field(default_factory=list)
    """rho of each task."""
    beta: list[list[float]] = field(default_factory=list)
    """After each task, beta of each task so far."""
    gradients: dict[str, Tensors] = field(default_factory=dict)
    """By task (its index as a string) the mean gradient of the protected weights at its end."""

    def with_task(
        self, task: int, gradient: Tensors, before: Subspaces, after: Subspaces
    ) -> ProjectionRecord:
        """Return the record with one more task.

        Args:
            task: The task's index.
            gradient: Mean gradient at the task's end, by weight name.
            before: Protected subspaces during its training, which determine rho.
            after: Protected subspaces with its directions, which determine beta of all tasks.
        """
        gradients = self.gradients | {str(task): gradient}
        beta = [surviving_fraction(gradients[key], after) for key in sorted(gradients, key=int)]
        rho = surviving_fraction(gradient, before) ** 2
        return ProjectionRecord([*self.rho, rho], [*self.beta, beta], gradients)


def local_gradient(client: Client, layers: tuple[Layer, ...]) -> Tensors:
    """Return the gradient of a client's mean loss with respect to the protected weights."""
    names = [layer.name for layer in layers]
    leaves = {name: client.params[name].detach().clone().requires_grad_() for name in names}
    total = {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    params = client.params | leaves
    for batch in client.data.batches():
        loss = target_losses(client.logits(batch, params), batch).sum()
        for name, grad in zip(names, torch.autograd.grad(loss, list(leaves.values())), strict=True):
            total[name] += grad
    return {name: value / len(client.data) for name, value in total.items()}


def surviving_fraction(gradient: Tensors, spaces: Subspaces) -> float:
    """Return ||P g|| / ||g||, where P projects out the protected subspaces."""
    whole = _squared_norm(gradient)
    remaining = _squared_norm(project_out_all(gradient, spaces))
    return float((remaining / max(whole, 1e-300)) ** 0.5)


def _squared_norm(gradient: Tensors) -> float:
    return sum(float(g.double().square().sum()) for g in gradient.values())
