"""Plain convolutional networks: a small one, and the AlexNet-like one of FOT's appendix F.3."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from perdure.core.trees import Tensors
from perdure.models import ops
from perdure.models.forward_pass import ForwardPass
from perdure.models.layers import NO_NORM, Layer, Norm, conv_layer, init_body, linear_layer


@dataclass(frozen=True)
class ConvNet:
    """Convolutions, each with ReLU and 2x2 max pooling, and then fully connected layers."""

    shape: tuple[int, int, int]
    """Channels, height and width of the images."""
    channels: tuple[int, ...]
    """Output channels of each convolution."""
    kernels: tuple[int, ...]
    """Side of each convolution's kernel."""
    paddings: tuple[int, ...]
    """Padding of each convolution."""
    hidden: tuple[int, ...]
    """Size of each fully connected layer."""
    dropout: tuple[float, ...]
    """Rate for each convolution's output (before pooling), then for each hidden layer's."""
    norm: Norm = NO_NORM
    """Norm after each layer."""
    bias: bool = True
    """Whether the layers have biases."""

    @property
    def feature_size(self) -> int:
        """Size of the last hidden layer."""
        return self.hidden[-1]

    @cached_property
    def convs(self) -> tuple[Layer, ...]:
        """The convolutions: conv1, conv2, ..."""
        sizes = (self.shape[0], *self.channels)
        return tuple(
            conv_layer(f"conv{i + 1}", sizes[i], sizes[i + 1], kernel, 1, padding, self.bias)
            for i, (kernel, padding) in enumerate(zip(self.kernels, self.paddings, strict=True))
        )

    @cached_property
    def grid(self) -> tuple[int, int]:
        """Height and width after the last pooling; 0 if the images are too small."""
        height, width = self.shape[1:]
        for conv in self.convs:
            height, width = conv.output_size(height) // 2, conv.output_size(width) // 2
        return max(height, 0), max(width, 0)

    @cached_property
    def linears(self) -> tuple[Layer, ...]:
        """The fully connected layers: fc1, fc2, ..."""
        sizes = (self.channels[-1] * self.grid[0] * self.grid[1], *self.hidden)
        return tuple(
            linear_layer(f"fc{i + 1}", sizes[i], sizes[i + 1], self.bias)
            for i in range(len(self.hidden))
        )

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """Convolutions and fully connected layers."""
        return self.convs + self.linears

    def init(self, generator: torch.Generator) -> tuple[Tensors, Tensors]:
        """Return the initial parameters and buffers."""
        norms = {f"bn{i + 1}": layer.outputs for i, layer in enumerate(self.layers)}
        return init_body(self.layers, norms, self.norm, generator)

    def features(self, params: Tensors, x: Tensor, fwd: ForwardPass) -> Tensor:
        """Return the last hidden layer's output, after ReLU and dropout: float [batch, size]."""
        for i, conv in enumerate(self.convs):
            x = self.norm(params, conv(params, x, fwd), fwd, f"bn{i + 1}")
            x = ops.dropout(x, self.dropout[i], fwd)
            # ReLU commutes with dropout and with pooling; after them it has a quarter of the work.
            x = torch.relu(F.max_pool2d(x, 2))
        x = x.flatten(1)
        for i, layer in enumerate(self.linears, start=len(self.convs)):
            x = self.norm(params, layer(params, x, fwd), fwd, f"bn{i + 1}")
            x = ops.dropout(torch.relu(x), self.dropout[i], fwd)
        return x


def small_conv(
    shape: tuple[int, int, int], width: int, dropout: tuple[float, ...], norm: Norm, bias: bool
) -> ConvNet:
    """Return two 3x3 convolutions and 128 hidden units, for images of at least 4x4 pixels."""
    return ConvNet(shape, (width, 2 * width), (3, 3), (1, 1), (128,), dropout, norm, bias)


def alexnet(
    shape: tuple[int, int, int], width: int, dropout: tuple[float, ...], norm: Norm, bias: bool
) -> ConvNet:
    """Return convolutions with kernels of 4, 3 and 2 pixels and two layers of 2048 hidden units.

    Images must have at least 19x19 pixels.
    """
    channels = (width, 2 * width, 4 * width)
    return ConvNet(shape, channels, (4, 3, 2), (0, 0, 0), (2048, 2048), dropout, norm, bias)
