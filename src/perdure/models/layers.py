"""The components of bodies: weight layers with their geometry and initial values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Self

import torch
from torch import Tensor

from perdure.core.rng import Rng
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


Card = dict[str, Any]
"""Identifies pretrained weights: their name, kind, config and SHA-256."""


@dataclass(frozen=True)
class BodySetup:
    """What a body is built with besides its config and the shape of an input."""

    folder: Path | None = None
    """Where the file of a custom module is looked up before the working folder."""
    seed: int = 0
    """Seed of a custom module's initial weights."""
    rows: Tensor | None = None
    """A few inputs, [rows, ...]. If None, random ones."""
    reads_weights: bool = True
    """Whether a custom module reads the file of `model.init`; not for a trained model."""
    card: Card | None = None
    """Card of the pretrained weights of a trained model. If None, those that the config names."""


class Body:
    """A model without its head. What is not known of every body has a default here."""

    feature_size: int
    """Values per row that the head gets."""
    layers: tuple[Layer, ...]
    """Every trained weight matrix, in the order of the forward pass."""
    constants: Mapping[str, Tensor] = MappingProxyType({})
    """Tensors that are not parameters: the weights of a frozen backbone or of frozen modules."""
    initial_head: Mapping[str, Tensor] = MappingProxyType({})
    """Weight and bias of a separate head, as head.weight and head.bias; empty if it has none."""
    unprotected: tuple[str, ...] = ()
    """Trained weights whose inputs cannot be recorded, so that they are not in `layers`."""
    has_running_statistics: bool = True
    """Whether no batch norm uses the statistics of a batch in predictions, too."""

    @property
    def card(self) -> Card | None:
        """What identifies the pretrained weights that it is built on, or None."""
        return None

    @property
    def vector_reason(self) -> str | None:
        """Why clients cannot be stacked, or None if they can."""
        return None

    def init(self, generator: torch.Generator) -> tuple[Tensors, Tensors]:
        """Return the initial parameters and buffers."""
        raise NotImplementedError

    def features(
        self, params: Tensors, x: Tensor, fwd: ForwardPass, tasks: int | None = None
    ) -> Tensor:
        """Return the head's input, float [batch, feature_size].

        Args:
            params: All parameters.
            x: Examples [batch, ...].
            fwd: Circumstances of the forward pass.
            tasks: Number of tasks so far, which a body with parts for each task needs.

        """
        raise NotImplementedError

    def grow(self, params: Tensors, task: int, rng: Rng) -> Tensors:
        """Return the parameters with what a task adds to them."""
        return params

    def to(self, device: torch.device) -> Self:
        """Return the body with its constants on a device."""
        return self

    def with_constants(self, constants: Tensors) -> Self:
        """Return a copy with other values of its constants."""
        return self

    def with_cached_features(self, features: Tensor) -> Self:
        """Return a copy that uses cached features of the next batch, [batch, width]."""
        return self


def set_facts(body: Body, **facts: Any) -> None:
    """Set the facts of a body that is a frozen dataclass, when it is made."""
    for name, value in facts.items():
        object.__setattr__(body, name, value)


def _uniform(shape: tuple[int, ...], bound: float, generator: torch.Generator) -> Tensor:
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


def _normal(shape: tuple[int, ...], std: float, generator: torch.Generator) -> Tensor:
    return torch.empty(shape).normal_(0, std, generator=generator)
