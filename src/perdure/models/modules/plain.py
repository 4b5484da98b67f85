"""What the networks of this library share: keys, norms, initial values, and how a body is made."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from perdure.config.model import ModelConfig
from perdure.config.section import PositiveInt, Probabilities
from perdure.core.errors import bad_value
from perdure.core.trees import Tensors
from perdure.models.adapter.examination import Examination, outline
from perdure.models.adapter.module_body import ModuleBody
from perdure.models.layers import BodySetup, InitScheme

# ---- The normalization layers that a network uses throughout, and modules one after another

NormKind = Literal["batch", "group", "none"]


@dataclass(frozen=True)
class Norm:
    """The kind of a network's normalization layers: batch, group or none."""

    kind: NormKind
    """Batch norm, group norm, or no normalization."""
    running_stats: bool = True
    """Whether batch norm has running statistics. If not, it always uses those of the batch."""

    def for_rows(self, channels: int) -> nn.Module:
        """Return a layer for values [batch, channels]."""
        return self._layer(nn.BatchNorm1d, channels)

    def for_images(self, channels: int) -> nn.Module:
        """Return a layer for images [batch, channels, height, width]."""
        return self._layer(nn.BatchNorm2d, channels)

    def _layer(self, batch_norm: type[nn.Module], channels: int) -> nn.Module:
        if self.kind == "batch":
            return batch_norm(channels, track_running_stats=self.running_stats)
        if self.kind == "group":
            return nn.GroupNorm(math.gcd(channels, 8), channels)
        return nn.Identity()


NO_NORM = Norm("none")


def sequence(parts: dict[str, nn.Module]) -> nn.Sequential:
    """Return named parts as one module, without those that change nothing.

    A small layer takes about 30 microseconds and the call of a module one or two, so parts that
    only pass their input on would be noticed.
    """
    kept: OrderedDict[str, nn.Module] = OrderedDict()
    for name, part in parts.items():
        is_idle = isinstance(part, nn.Identity) or (isinstance(part, nn.Dropout) and part.p == 0)
        if not is_idle:
            kept[name] = part
    return nn.Sequential(kept)


# ---- A plain module as a body: its layers are found by one call, its weights are drawn by the run.


class PlainBody(ModuleBody):
    """A module of this package, which returns features.

    Tests have shown that it can be trained and stacked, so that it is not tried out: one call with
    zeros finds its layers.
    """

    def __init__(
        self, module: nn.Module, shape: tuple[int, ...], scheme: InitScheme = "uniform"
    ) -> None:
        self._scheme = scheme
        super().__init__(module, torch.zeros(1, *shape))

    def _examine(self, params: Tensors, head_layer: str | None) -> Examination:
        zeros = {name: torch.zeros(value.shape) for name, value in params.items()}
        buffers = {name: torch.zeros(value.shape) for name, value in self._buffers.items()}
        return outline(self._runnable, zeros, buffers, self._rows)

    @property
    def vector_reason(self) -> str | None:
        """Nothing: clients can be stacked."""
        return None

    def init(self, generator: torch.Generator) -> tuple[Tensors, Tensors]:
        """Return drawn weights, then the parameters of norms; and running statistics."""
        params: Tensors = {}
        for layer in self.layers:
            params |= layer.init(generator, self._scheme)
        norms = {n: _initial(n, p) for n, p in self._params.items() if n not in params}
        return params | norms, {n: _initial(n, value) for n, value in self._buffers.items()}

    def to(self, device: torch.device) -> PlainBody:
        """Return the body itself, since it holds no values."""
        return self


def _initial(name: str, like: Tensor) -> Tensor:
    """Return the initial value of a norm's scale, shift, running mean or running variance."""
    is_one = name.endswith((".weight", ".running_var"))
    return torch.full(like.shape, float(is_one))


# ---- The keys of the plain networks

Image = tuple[int, int, int]
"""Channels, height and width of images."""


class PlainModel(ModelConfig):
    """A network of plain layers. A kind defines `make_module`."""

    bias: bool = True
    """Whether layers have a bias; of residual networks, vit and text the head alone."""
    norm: NormKind | None = None
    """Normalization layers. Default: batch for residual networks, none for the others."""
    running_stats: bool = True
    """Batch norm keeps running statistics. If false, it uses those of the batch in tests too."""

    default_norm: ClassVar[NormKind] = "none"
    """The normalization layers if the config names none."""
    scheme: ClassVar[InitScheme] = "uniform"
    """Distribution of the initial weights."""

    @abstractmethod
    def make_module(self, shape: tuple[int, ...]) -> nn.Module:
        """Return the module, whose output is the head's input."""

    def make_body(self, shape: tuple[int, ...], classes: int, setup: BodySetup) -> PlainBody:
        """Return the network without its head."""
        with torch.device("meta"):
            module = self.make_module(shape)
        # Without norms He's scheme makes the signal of a residual network grow with every block, so
        # the weights then have PyTorch's smaller default.
        return PlainBody(module, shape, "uniform" if self.norm == "none" else self.scheme)

    def head_has_bias(self, body: Any) -> bool:
        """Return whether the head has a bias."""
        return self.bias

    def norm_layers(self) -> Norm:
        """Return the normalization layers of the network."""
        return Norm(self.norm or self.default_norm, self.running_stats)


class ImageModel(PlainModel):
    """A convolutional network. A kind defines `make_for`."""

    width: PositiveInt | None = None
    """Channels of the first convolution. Default: conv 16, alexnet 64, resnet18 64,
    resnet18-reduced 20, resnet20 and resnet32 16."""

    default_width: ClassVar[int] = 16
    """The channels if the config names none."""

    @abstractmethod
    def make_for(self, image: Image, width: int, norm: Norm) -> nn.Module:
        """Return the module for images of a size."""

    def make_module(self, shape: tuple[int, ...]) -> nn.Module:
        """Return the module, whose output is the head's input."""
        image = check_image(self, shape)
        return self.make_for(image, self.width or self.default_width, self.norm_layers())


def check_image(config: ModelConfig, shape: tuple[int, ...]) -> Image:
    """Return the shape of images; refuse inputs of another shape."""
    if len(shape) == 3:
        return shape[0], shape[1], shape[2]
    size = " x ".join(str(length) for length in shape)
    expected = f"mlp, since an input has {size} features and is not an image"
    raise bad_value("model.kind", config.kind, expected)


def dropout_rates(kind: str, rates: Probabilities, count: int) -> tuple[float, ...]:
    """Return the rates of a model's `count` dropout layers."""
    if not isinstance(rates, list):
        return (rates,) * count
    if len(rates) != count:
        expected = f"one value or a list of {count} for model.kind {kind}"
        raise bad_value("model.dropout", rates, expected)
    return tuple(rates)
