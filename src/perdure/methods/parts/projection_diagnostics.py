"""What projection costs a new task and spares the old ones (FedProTIP, section 5 and Figure 2).

rho_t: the share of the current task's squared gradient that survives projection (assumption 4).
beta_tau^(t): the share of an old task's gradient norm that is still open to updates (assumption 5).
Both are taken over the protected weights. Old data is gone when a new task is trained, so the
gradient of task tau is that of its own end, averaged over clients, and so is rho's.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from perdure.contract import Client
from perdure.contract.step import cross_entropy_rows
from perdure.contract.transforms import project_out_all
from perdure.core.trees import Tensors
from perdure.methods.parts.protected_layers import Subspaces
from perdure.models.layers import Layer


@dataclass(frozen=True)
class ProjectionRecord:
    """The record of rho and beta over the tasks so far."""

    rho: list[float] = field(default_factory=list)
    """By task."""
    beta: list[list[float]] = field(default_factory=list)
    """After each task, of each task so far."""
    gradients: dict[str, Tensors] = field(default_factory=dict)
    """By task the mean gradient of the protected weights at its end, by weight name."""

    def extended(
        self, task: int, gradient: Tensors, before: Subspaces, after: Subspaces
    ) -> ProjectionRecord:
        """Return the record with one more task.

        Args:
            task: The task's index.
            gradient: Its gradient at its end.
            before: Spaces that it was trained with: they decide rho.
            after: Spaces with its own directions: they decide the beta of all tasks.
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
        loss = cross_entropy_rows(client.logits(batch, params), batch).sum()
        for name, grad in zip(names, torch.autograd.grad(loss, list(leaves.values())), strict=True):
            total[name] += grad
    return {name: value / len(client.data) for name, value in total.items()}


def surviving_fraction(gradient: Tensors, spaces: Subspaces) -> float:
    """Return ||P g|| / ||g||."""
    whole = sum(float(g.double().square().sum()) for g in gradient.values())
    left = sum(float(g.double().square().sum()) for g in project_out_all(gradient, spaces).values())
    return float((left / max(whole, 1e-300)) ** 0.5)
