"""GPM on FedAvg: each client keeps bases of its own and projects its own steps.

Saha, Garg, Roy: Gradient Projection Memory for Continual Learning, ICLR 2021; on FedAvg as in FOT
(Bakman et al., ICLR 2024, appendix F.2): clients compute the orthogonal set locally at each task's
end and project their local updates; the server averages. Nothing of the bases leaves a client.

Ours: a client works with the global model of the task's end; biases and norms stand still after the
first task.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from perdure.algebra.subspaces import Space, extend, project_right
from perdure.methods.base import Client, Finish, Method, Place
from perdure.methods.parts.bases import core_basis, gpm_rule, sampled_inputs
from perdure.methods.parts.protection import protectable, still_trained
from perdure.models.layers import Layer
from perdure.trees import Tensors, Tree

Count = Annotated[int, Field(ge=1)]


@dataclass(frozen=True)
class GPM(Method):
    """Local bases, local projection.

    threshold, threshold_increment: GPM's epsilon_th, and what is added to it with each task.
    columns: input columns a layer that are decomposed; images: examples they come from.
    """

    threshold: Annotated[float, Field(gt=0, le=1)] = 0.95
    threshold_increment: Annotated[float, Field(ge=0, lt=1)] = 0.0
    columns: Count = 512
    images: Count = 1280

    paper: ClassVar[str] = "Saha et al., ICLR 2021; on FedAvg as in Bakman et al., ICLR 2024"
    beside_prompts: ClassVar[bool] = False

    def preferred_head(self, stream: str) -> str:
        """A head for each task where tasks have classes of their own, as in the paper."""
        return "growing" if stream == "split" else "shared"

    def trainable(self, params: Tensors, place: Place) -> tuple[str, ...]:
        """After the first task: projected weights and the task's head."""
        names = super().trainable(params, place)
        return still_trained(names, place, protectable(place.network))

    def batch_statistics(self, place: Place) -> bool:
        """Running statistics stand still after the first task."""
        return place.task == 0

    def prepare(self, client: Client) -> Tensors:
        """The client's bases by weight name; zero columns stand for no direction."""
        if client.place.task == 0:
            return {}
        kept = client.kept.get("bases", {})
        layers = protectable(client.place.network)
        return {layer.name: _padded(_basis(kept, layer, client), client) for layer in layers}

    def gradient(self, grads: Tensors, params: Tensors, received: Tree, own: Tensors) -> Tensors:
        """With the client's own M: g <- g - g M M^T."""
        return {name: _without(g, own[name]) if name in own else g for name, g in grads.items()}

    def settles(self, optimizer: str) -> bool:
        """Sums of projected gradients are projected; steps that scale each entry are not."""
        return optimizer != "sgd"

    def settle(
        self, params: Tensors, before: Tensors, received: Tree, own: Tensors, lr: float
    ) -> Tensors:
        """The step of an adaptive optimiser, projected."""
        steps = {name: before[name] + _without(params[name] - before[name], own[name])
                 for name in own if name in params}  # fmt: skip
        return params | steps

    def consolidates(self, place: Place) -> int:
        """One extra round after every task, in which nothing is sent."""
        return 1

    def consolidates_alone(self) -> bool:
        """Nothing travels for it."""
        return True

    def extract(self, client: Client) -> Finish:
        """GPM's update of the memory: directions that old ones do not cover, by squared norms."""
        place, kept = client.place, client.kept.get("bases", {})
        layers, rule = protectable(place.network), gpm_rule(self.threshold_at(place.task))
        inputs = sampled_inputs(client, layers, self.images, self.columns, client.draw("gpm"))
        bases = {}
        for layer in layers:
            old = _basis(kept, layer, client)
            new = core_basis(inputs[layer.name], Space.of(old), rule)
            bases[layer.name] = extend(old, new.directions)
        return Finish({}, {"bases": bases})

    def threshold_at(self, task: int) -> float:
        """epsilon_th of a task."""
        return min(1.0, self.threshold + self.threshold_increment * task)


def _basis(kept: Tree, layer: Layer, client: Client) -> Tensor:
    found: Tensor | None = kept.get(layer.name)
    device = client.shard.index.device
    return torch.zeros(layer.inputs, 0, device=device) if found is None else found


def _padded(basis: Tensor, client: Client) -> Tensor:
    """Zero columns up to a multiple of an eighth of the space, so that stacks have few shapes."""
    size, rank = basis.shape
    step = max(1, size // 8)
    width = min(size, -(-max(rank, 1) // step) * step)
    return F.pad(basis, (0, max(0, width - rank)))


def _without(value: Tensor, basis: Tensor) -> Tensor:
    matrix = value.reshape(value.shape[0], -1)
    return project_right(matrix, basis).reshape(value.shape)
