"""What projection costs a new task and spares the old ones (FedProTIP, section 5 and Figure 2).

rho_t: the share of the current task's squared gradient that survives projection (assumption 4).
beta_tau^(t): the share of an old task's gradient norm that is still open to updates (assumption 5).
Both are taken over the protected weights. Old data is gone when a new task is trained, so the
gradient of task tau is that of its own end, averaged over clients, and so is rho's.
"""

from __future__ import annotations

import torch

from perdure.methods.base import Client
from perdure.methods.parts.projection import project
from perdure.models.layers import Layer
from perdure.trees import Tensors, Tree


def local_gradient(client: Client, layers: tuple[Layer, ...]) -> Tensors:
    """The gradient of a client's mean loss with respect to the protected weights."""
    names = [layer.name for layer in layers]
    leaves = {name: client.params[name].detach().clone().requires_grad_() for name in names}
    total = {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    params = client.params | leaves
    for batch in client.shard.batches():
        loss = batch.cross_entropy(client.net().logits(params, batch.x)) * len(batch.y)
        for name, grad in zip(names, torch.autograd.grad(loss, list(leaves.values())), strict=True):
            total[name] += grad
    return {name: value / len(client.shard) for name, value in total.items()}


def surviving(gradient: Tensors, spaces: Tree) -> float:
    """||P g|| / ||g||."""
    whole = sum(float(g.double().square().sum()) for g in gradient.values())
    left = sum(float(g.double().square().sum()) for g in project(gradient, spaces).values())
    return float((left / max(whole, 1e-300)) ** 0.5)


def noted(memory: Tree, spaces: Tree, gradient: Tensors, task: int) -> Tree:
    """The record with one more task: rho under the old spaces, beta of all tasks under the new."""
    old = memory.get("geometry", {"rho": [], "beta": [], "gradients": {}})
    gradients = old["gradients"] | {str(task): gradient}
    beta = [surviving(gradients[key], spaces) for key in sorted(gradients, key=int)]
    rho = surviving(gradient, memory["spaces"]) ** 2
    return {"rho": [*old["rho"], rho], "beta": [*old["beta"], beta], "gradients": gradients}
