"""The components of bodies: weight layers with their geometry and initial values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from perdure.core.trees import Tensors
from perdure.models import ops
from perdure.models.ops import PLAIN_CONV, ForwardPass
from perdure.models.stacked import ConvGeometry, Pair

InitScheme = Literal["uniform", "fan_in", "fan_out"]
"""PyTorch's default for its layers, or He's normal distribution by fan-in or fan-out."""


@dataclass(frozen=True)
class Layer:
    """A weight matrix of a body: its name, and the geometry that im2col columns need."""

    name: str
    """Name of its weight, such as conv1.weight."""
    kind: Literal["linear", "conv"]
    """Fully connected layer or convolution."""
    inputs: int
    """Columns of the weight as a matrix: for a convolution, channels / groups * height * width."""
    outputs: int
    """Rows of the weight: output features or channels."""
    kernel: Pair = (1, 1)
    """Height and width of a convolution's kernel in pixels."""
    geometry: ConvGeometry = PLAIN_CONV
    """Stride, padding, dilation and groups of a convolution."""
    bias: bool = True
    """Whether the layer has a bias."""

    @property
    def bias_name(self) -> str:
        """Name of its bias, whether it has one or not."""
        return self.name.removesuffix("weight") + "bias"

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of its weight."""
        if self.kind == "linear":
            return self.outputs, self.inputs
        return self.outputs, self.inputs // math.prod(self.kernel), *self.kernel

    def init(self, generator: torch.Generator, scheme: InitScheme = "uniform") -> Tensors:
        """Return its initial weight, and its bias if it has one."""
        bound = 1 / math.sqrt(self.inputs)
        if scheme == "uniform":
            values = {self.name: _uniform(self.shape, bound, generator)}
        else:
            fan = self.inputs if scheme == "fan_in" else self.outputs * math.prod(self.kernel)
            values = {self.name: _normal(self.shape, math.sqrt(2 / fan), generator)}
        if self.bias:
            values[self.bias_name] = _uniform((self.outputs,), bound, generator)
        return values

    def __call__(self, params: Tensors, x: Tensor, fwd: ForwardPass) -> Tensor:
        """Return the output of a fully connected layer for rows [..., inputs]."""
        return ops.linear(x, params[self.name], params.get(self.bias_name), fwd, self.name)


def linear_layer(name: str, inputs: int, outputs: int, bias: bool = True) -> Layer:
    """Return a fully connected layer; `name` is the prefix of its parameters, such as fc1."""
    return Layer(f"{name}.weight", "linear", inputs, outputs, bias=bias)


def conv_layer(name: str, shape: Sequence[int], geometry: ConvGeometry, bias: bool = True) -> Layer:
    """Return a convolution."""
    outputs, channels, height, width = shape
    inputs = channels * height * width
    return Layer(name, "conv", inputs, outputs, (height, width), geometry, bias)


class Body(Protocol):
    """A model without its head."""

    @property
    def feature_size(self) -> int:
        """Values per row that the head gets."""

    @property
    def layers(self) -> tuple[Layer, ...]:
        """Every weight matrix, in the order of the forward pass."""

    def init(self, generator: torch.Generator) -> tuple[Tensors, Tensors]:
        """Return the initial parameters and buffers."""

    def features(self, params: Tensors, x: Tensor, fwd: ForwardPass) -> Tensor:
        """Return the head's input, float [batch, feature_size]."""


def _uniform(shape: tuple[int, ...], bound: float, generator: torch.Generator) -> Tensor:
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


def _normal(shape: tuple[int, ...], std: float, generator: torch.Generator) -> Tensor:
    return torch.empty(shape).normal_(0, std, generator=generator)
