"""Plain convolutional networks: a small one, and the AlexNet-like one of FOT's appendix F.3."""

from __future__ import annotations

from itertools import pairwise
from typing import ClassVar

from torch import nn

from perdure.config.section import Probabilities
from perdure.core.errors import bad_value
from perdure.models.modules.mlp import hidden_layers
from perdure.models.modules.plain import Image, ImageModel, Norm, dropout_rates, sequence


class ConvModel(ImageModel):
    """A small convolutional network.

    Example: `model: {kind: conv, width: 8}`
    """

    dropout: Probabilities = 0.0
    """Dropout rate, or one rate for each of the places (conv 3, alexnet 5)."""

    def make_for(self, image: Image, width: int, norm: Norm) -> nn.Module:
        """Return two 3x3 convolutions and 128 hidden units, for at least 4x4 pixels."""
        rates = dropout_rates(self.kind, self.dropout, 3)
        try:
            return conv_net(image, (width, 2 * width), (3, 3), 1, (128,), rates, norm, self.bias)
        except ImageTooSmall:
            raise _too_small(self.kind, image) from None


class AlexnetModel(ImageModel):
    """The small AlexNet of the continual-learning literature.

    Example: `model: {kind: alexnet, dropout: [0.2, 0.2, 0.5, 0.5, 0.5]}`
    """

    dropout: Probabilities = 0.0
    """Dropout rate, or one rate for each of the places (conv 3, alexnet 5)."""

    default_width: ClassVar[int] = 64

    def make_for(self, image: Image, width: int, norm: Norm) -> nn.Module:
        """Return convolutions of 4, 3 and 2 pixels and two layers of 2048 hidden units.

        Images must have at least 19x19 pixels.
        """
        rates = dropout_rates(self.kind, self.dropout, 5)
        channels = (width, 2 * width, 4 * width)
        try:
            return conv_net(image, channels, (4, 3, 2), 0, (2048, 2048), rates, norm, self.bias)
        except ImageTooSmall:
            raise _too_small(self.kind, image) from None


class ImageTooSmall(Exception):
    """Pooling leaves nothing of the images."""


def _too_small(kind: str, image: Image) -> Exception:
    expected = f"a model for images as small as {image[1]}x{image[2]}, such as mlp"
    return bad_value("model.kind", kind, expected)


def conv_net(
    shape: Image,
    channels: tuple[int, ...],
    kernels: tuple[int, ...],
    padding: int,
    hidden: tuple[int, ...],
    dropout: tuple[float, ...],
    norm: Norm,
    bias: bool,
) -> nn.Sequential:
    """Return convolutions, each with ReLU and 2x2 max pooling, and then fully connected layers.

    Raises:
        ImageTooSmall: Nothing is left of the images after the last pooling.

    """
    height, width = (_side_after(side, kernels, padding) for side in shape[1:])
    if not height * width:
        raise ImageTooSmall
    parts: dict[str, nn.Module] = {}
    sizes = pairwise((shape[0], *channels))
    for i, ((inputs, outputs), kernel) in enumerate(zip(sizes, kernels, strict=True), start=1):
        # ReLU commutes with dropout and with pooling; after them it has a quarter of the work.
        parts |= {
            f"conv{i}": nn.Conv2d(inputs, outputs, kernel, padding=padding, bias=bias),
            f"bn{i}": norm.for_images(outputs),
            f"drop{i}": nn.Dropout(dropout[i - 1]),
            f"pool{i}": nn.MaxPool2d(2),
            f"relu{i}": nn.ReLU(),
        }
    count, features = len(channels), channels[-1] * height * width
    layers = hidden_layers((features, *hidden), dropout[count:], norm, bias, before=count)
    return sequence(parts | {"flatten": nn.Flatten()} | layers)


def _side_after(side: int, kernels: tuple[int, ...], padding: int) -> int:
    """Return the side of an image after the last pooling; 0 if nothing is left of it."""
    for kernel in kernels:
        side = max(side + 2 * padding - kernel + 1, 0) // 2
    return side
