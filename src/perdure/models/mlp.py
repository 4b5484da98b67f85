"""A multi-layer perceptron of any depth."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from perdure.core.trees import Tensors
from perdure.models import ops
from perdure.models.forward_pass import ForwardPass
from perdure.models.layers import NO_NORM, Layer, Norm, init_body, linear_layer


@dataclass(frozen=True)
class Mlp:
    """Fully connected layers with ReLU: fc1, fc2, ..."""

    inputs: int
    """Values per row."""
    hidden: tuple[int, ...]
    """Size of each hidden layer."""
    dropout: tuple[float, ...]
    """Rate for the input, then for each hidden layer's output."""
    norm: Norm = NO_NORM
    """Norm between a hidden layer and its ReLU."""
    bias: bool = True
    """Whether the hidden layers have biases."""

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """The hidden layers, in order."""
        sizes = (self.inputs, *self.hidden)
        return tuple(
            linear_layer(f"fc{i + 1}", sizes[i], sizes[i + 1], self.bias)
            for i in range(len(self.hidden))
        )

    @property
    def feature_size(self) -> int:
        """Size of the last hidden layer, or of the input if there is none."""
        return (self.inputs, *self.hidden)[-1]

    def init(self, generator: torch.Generator) -> tuple[Tensors, Tensors]:
        """Return the initial parameters and buffers."""
        norms = {f"bn{i + 1}": size for i, size in enumerate(self.hidden)}
        return init_body(self.layers, norms, self.norm, generator)

    def features(self, params: Tensors, x: Tensor, fwd: ForwardPass) -> Tensor:
        """Return the last hidden layer's output, after ReLU and dropout: float [batch, size]."""
        x = ops.dropout(x.flatten(1), self.dropout[0], fwd)
        for i, layer in enumerate(self.layers, start=1):
            x = self.norm(params, layer(params, x, fwd), fwd, f"bn{i}")
            x = ops.dropout(torch.relu(x), self.dropout[i], fwd)
        return x
