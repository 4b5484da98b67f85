"""A network: a body, and a head whose outputs answer for classes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from perdure.config import ModelConfig
from perdure.core.rng import Rng
from perdure.core.trees import Tensors
from perdure.models import ops
from perdure.models.backbones import Card, backbone_card
from perdure.models.factory import make_body
from perdure.models.forward_pass import ForwardPass
from perdure.models.layers import Body, Layer, linear_layer
from perdure.models.outputs import Outputs
from perdure.models.prompts import Prompted


@dataclass(frozen=True)
class Network:
    """A model as a pure function of named parameters: features of the body, logits of the head."""

    body: Body
    outputs: Outputs
    bias: bool = True
    """The head has a bias."""

    @property
    def feature_size(self) -> int:
        """Values a row that the head gets."""
        return self.body.feature_size

    @property
    def layers(self) -> tuple[Layer, ...]:
        """Every weight matrix of the body, in the order of the forward pass."""
        return self.body.layers

    @property
    def constants(self) -> Tensors:
        """Tensors that it works with and that are no parameters: a frozen backbone's."""
        return self.body.constants if isinstance(self.body, Prompted) else {}

    @property
    def backbone(self) -> Card | None:
        """What identifies the checkpoint that it is built on; None: it is built on none."""
        body = self.body.frozen.backbone if isinstance(self.body, Prompted) else self.body
        return backbone_card(body)

    def with_cached_features(self, known: Tensor | None) -> Network:
        """The same, told what is known of the rows that come next."""
        if known is None or not isinstance(self.body, Prompted):
            return self
        return replace(self, body=self.body.with_cached_features(known))

    def to(self, device: torch.device) -> Network:
        """The same with its constants on a device."""
        if not isinstance(self.body, Prompted):
            return self
        return replace(self, body=self.body.to(device))

    def init(self, generator: torch.Generator) -> tuple[Tensors, Tensors]:
        """Parameters and buffers of the body and of the head for the first task."""
        params, buffers = self.body.init(generator)
        return params | self._head(0).init(generator), buffers

    def grow(self, params: Tensors, task: int, rng: Rng) -> Tensors:
        """The parameters with the outputs and prompts that a task needs; the same if there."""
        if isinstance(self.body, Prompted):
            params = self.body.grow(params, task, rng.torch_generator("prompt", task))
        head = self._head(task)
        return (
            params if head.name in params else params | head.init(rng.torch_generator("head", task))
        )

    def _head(self, task: int) -> Layer:
        if self.outputs.kind == "shared":
            return linear_layer("head", self.feature_size, self.outputs.classes, self.bias)
        count = len(self.outputs.task_classes[task])
        return linear_layer(f"head.{task}", self.feature_size, count, self.bias)

    def head_names(self, params: Tensors, task: int | None = None) -> tuple[str, ...]:
        """Names of the head's parameters: all of them, or a task's (shared: the same)."""
        growing = task is not None and self.outputs.kind == "growing"
        prefix = f"head.{task}." if growing else "head."
        return tuple(name for name in params if name.startswith(prefix))

    def features(self, params: Tensors, x: Tensor, fwd: ForwardPass) -> Tensor:
        """What the head gets: [batch, feature_size]."""
        return self.body.features(params, x, fwd)

    def classify(self, params: Tensors, features: Tensor, fwd: ForwardPass) -> Tensor:
        """The logits of all outputs that the parameters have, in the order of their tasks."""
        slices = self._slices(params)
        weight = _joined([params[f"{name}.weight"] for name in slices])
        bias = _joined([params[f"{name}.bias"] for name in slices]) if self.bias else None
        if fwd.layer_inputs is not None:
            fwd.layer_inputs.update({f"{name}.weight": features for name in slices[1:]})
        return ops.linear(features, weight, bias, fwd, f"{slices[0]}.weight")

    def _slices(self, params: Tensors) -> list[str]:
        if self.outputs.kind == "shared":
            return ["head"]
        tasks = range(len(self.outputs.task_classes))
        return [f"head.{task}" for task in tasks if f"head.{task}.weight" in params]

    def logits(self, params: Tensors, x: Tensor, fwd: ForwardPass) -> Tensor:
        """Features and their classification in one."""
        return self.classify(params, self.features(params, x, fwd), fwd)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def make_network(
    config: ModelConfig,
    shape: tuple[int, ...],
    outputs: Outputs,
    backbone: Card | None = None,
) -> Network:
    """The network of a config for inputs of a shape: (channels, height, width) or (features,).

    backbone: the card of the checkpoint that a trained model was built on.
    """
    return Network(make_body(config, shape, backbone), outputs, config.bias)
