"""What bodies are built from: weight layers with their geometry, norms, and how they start."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from perdure.core.trees import Tensors
from perdure.models import ops
from perdure.models.forward_pass import ForwardPass

InitScheme = Literal["uniform", "fan_in", "fan_out"]
"""PyTorch's default for its layers, or He's normal distribution by fan-in or fan-out."""
NormKind = Literal["batch", "group", "none"]


@dataclass(frozen=True)
class Layer:
    """A weight matrix of a body: its name and the geometry that im2col columns need."""

    name: str
    """Of its weight, such as conv1.weight."""
    kind: Literal["linear", "conv"]
    inputs: int
    """Columns of the weight as a matrix: for a convolution, channels * kernel * kernel."""
    outputs: int
    kernel: int = 1
    stride: int = 1
    padding: int = 0
    bias: bool = True

    @property
    def bias_name(self) -> str:
        """The name of its bias, whether it has one or not."""
        return self.name.removesuffix("weight") + "bias"

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of its weight."""
        if self.kind == "linear":
            return self.outputs, self.inputs
        return self.outputs, self.inputs // self.kernel**2, self.kernel, self.kernel

    def init(self, generator: torch.Generator, start: InitScheme = "uniform") -> Tensors:
        """Its first weight, and bias if it has one."""
        bound = 1 / math.sqrt(self.inputs)
        if start == "uniform":
            values = {self.name: _uniform(self.shape, bound, generator)}
        else:
            fan = self.inputs if start == "fan_in" else self.outputs * self.kernel**2
            values = {self.name: _normal(self.shape, math.sqrt(2 / fan), generator)}
        if self.bias:
            values[self.bias_name] = _uniform((self.outputs,), bound, generator)
        return values

    def __call__(self, params: Tensors, x: Tensor, fwd: ForwardPass) -> Tensor:
        """Apply it."""
        weight, bias = params[self.name], params.get(self.bias_name)
        if self.kind == "linear":
            return ops.linear(x, weight, bias, fwd, self.name)
        return ops.conv2d(x, weight, bias, fwd, self.name, self.stride, self.padding)

    def size(self, side: int) -> int:
        """Pixels a side of what it gives for that many pixels a side."""
        return (side + 2 * self.padding - self.kernel) // self.stride + 1


def linear_layer(name: str, inputs: int, outputs: int, bias: bool = True) -> Layer:
    """A fully connected layer; `name` without the .weight."""
    return Layer(f"{name}.weight", "linear", inputs, outputs, bias=bias)


def conv_layer(
    name: str,
    channels: int,
    outputs: int,
    kernel: int,
    stride: int = 1,
    padding: int = 0,
    bias: bool = True,
) -> Layer:
    """A convolution with a square kernel; `name` without the .weight."""
    inputs = channels * kernel**2
    return Layer(f"{name}.weight", "conv", inputs, outputs, kernel, stride, padding, bias)


@dataclass(frozen=True)
class Norm:
    """The normalisation that a body uses throughout: batch, group or none."""

    kind: NormKind
    running_stats: bool = True

    def init(self, name: str, channels: int) -> tuple[Tensors, Tensors]:
        """The parameters and buffers of one place."""
        if self.kind == "none":
            return {}, {}
        params = {f"{name}.weight": torch.ones(channels), f"{name}.bias": torch.zeros(channels)}
        if self.kind == "group" or not self.running_stats:
            return params, {}
        mean, var = torch.zeros(channels), torch.ones(channels)
        return params, {f"{name}.running_mean": mean, f"{name}.running_var": var}

    def __call__(self, params: Tensors, x: Tensor, fwd: ForwardPass, name: str) -> Tensor:
        """Normalise the channels of x."""
        if self.kind == "batch":
            return ops.batch_norm(x, fwd, params, name, running_stats=self.running_stats)
        if self.kind == "group":
            return ops.group_norm(x, fwd, params, name, group_count(x.shape[1]))
        return x


NO_NORM = Norm("none")


def group_count(channels: int) -> int:
    """Groups of a group norm: eight, or the most that divide both eight and the channels."""
    return math.gcd(channels, 8)


class Body(Protocol):
    """A model without its head."""

    @property
    def feature_size(self) -> int:
        """Values a row that the head gets."""

    @property
    def layers(self) -> tuple[Layer, ...]:
        """Every weight matrix, in the order of the forward pass."""

    def init(self, generator: torch.Generator) -> tuple[Tensors, Tensors]:
        """The first parameters and buffers."""

    def features(self, params: Tensors, x: Tensor, fwd: ForwardPass) -> Tensor:
        """What the head gets: [batch, feature_size]."""


def init_body(
    layers: tuple[Layer, ...],
    norms: dict[str, int],
    norm: Norm,
    generator: torch.Generator,
    start: InitScheme = "uniform",
) -> tuple[Tensors, Tensors]:
    """First values of the layers, in their order, and of the norms (channels by name)."""
    params: Tensors = {}
    buffers: Tensors = {}
    for layer in layers:
        params |= layer.init(generator, start)
    for name, channels in norms.items():
        scales, statistics = norm.init(name, channels)
        params |= scales
        buffers |= statistics
    return params, buffers


def _uniform(shape: tuple[int, ...], bound: float, generator: torch.Generator) -> Tensor:
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


def _normal(shape: tuple[int, ...], std: float, generator: torch.Generator) -> Tensor:
    return torch.empty(shape).normal_(0, std, generator=generator)
