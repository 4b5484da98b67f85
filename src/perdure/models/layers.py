"""The components of bodies: weight layers with their geometry, norms, and their initial values."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from perdure.core.trees import Tensors
from perdure.models import ops
from perdure.models.forward_pass import ForwardPass
from perdure.models.ops import PLAIN_CONV
from perdure.models.stacked_conv import ConvGeometry, Pair

InitScheme = Literal["uniform", "fan_in", "fan_out"]
"""PyTorch's default for its layers, or He's normal distribution by fan-in or fan-out."""
NormKind = Literal["batch", "group", "none"]


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
        """Return the layer's output for x: rows [..., inputs] or images [batch, C, H, W]."""
        weight, bias = params[self.name], params.get(self.bias_name)
        if self.kind == "linear":
            return ops.linear(x, weight, bias, fwd, self.name)
        return ops.conv2d(x, weight, bias, fwd, self.name, self.geometry)

    def output_size(self, side: int) -> int:
        """Return the side of the output in pixels for an input with this side, if it is square."""
        padding, stride = self.geometry.padding[0], self.geometry.stride[0]
        return (side + 2 * padding - self.kernel[0]) // stride + 1


def linear_layer(name: str, inputs: int, outputs: int, bias: bool = True) -> Layer:
    """Return a fully connected layer; `name` is the prefix of its parameters, such as fc1."""
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
    """Return a convolution with a square kernel.

    Args:
        name: Prefix of its parameters, such as conv1.
        channels: Input channels.
        outputs: Output channels.
        kernel: Side of the kernel in pixels.
        stride: Stride in both directions.
        padding: Pixels of zeros on every side.
        bias: Whether it has a bias.
    """
    inputs, geometry = channels * kernel**2, ConvGeometry((stride,) * 2, (padding,) * 2)
    return Layer(f"{name}.weight", "conv", inputs, outputs, (kernel,) * 2, geometry, bias)


@dataclass(frozen=True)
class Norm:
    """The normalization that a body uses throughout: batch, group or none."""

    kind: NormKind
    """Batch norm, group norm, or no normalization."""
    running_stats: bool = True
    """Whether batch norm has running statistics. If not, it always uses those of the batch."""

    def init(self, name: str, channels: int) -> tuple[Tensors, Tensors]:
        """Return the initial parameters and buffers of the norm with this name."""
        if self.kind == "none":
            return {}, {}
        params = {f"{name}.weight": torch.ones(channels), f"{name}.bias": torch.zeros(channels)}
        if self.kind == "group" or not self.running_stats:
            return params, {}
        mean, var = torch.zeros(channels), torch.ones(channels)
        return params, {f"{name}.running_mean": mean, f"{name}.running_var": var}

    def __call__(self, params: Tensors, x: Tensor, fwd: ForwardPass, name: str) -> Tensor:
        """Return x [batch, channels, ...] with its channels normalized."""
        if self.kind == "batch":
            return ops.batch_norm(x, fwd, params, name, running_stats=self.running_stats)
        if self.kind == "group":
            return ops.group_norm(x, fwd, params, name, group_count(x.shape[1]))
        return x


NO_NORM = Norm("none")


def group_count(channels: int) -> int:
    """Return the groups of a group norm: the largest common divisor of 8 and the channels."""
    return math.gcd(channels, 8)


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


def init_body(
    layers: tuple[Layer, ...],
    norms: dict[str, int],
    norm: Norm,
    generator: torch.Generator,
    scheme: InitScheme = "uniform",
) -> tuple[Tensors, Tensors]:
    """Return the initial parameters and buffers of a body.

    Args:
        layers: Weight layers, in the order in which they are drawn.
        norms: Channels of each norm, by name.
        norm: Kind of the norms.
        generator: CPU generator of the weights.
        scheme: Distribution of the weights.
    """
    params: Tensors = {}
    buffers: Tensors = {}
    for layer in layers:
        params |= layer.init(generator, scheme)
    for name, channels in norms.items():
        scales, statistics = norm.init(name, channels)
        params |= scales
        buffers |= statistics
    return params, buffers


def _uniform(shape: tuple[int, ...], bound: float, generator: torch.Generator) -> Tensor:
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


def _normal(shape: tuple[int, ...], std: float, generator: torch.Generator) -> Tensor:
    return torch.empty(shape).normal_(0, std, generator=generator)
