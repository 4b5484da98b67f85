"""Plain convolutional networks: a small one, and the AlexNet-like one of FOT's appendix F.3."""

from __future__ import annotations

from itertools import pairwise

from torch import nn

from perdure.models.modules.mlp import Norm, hidden_layers, sequence

Image = tuple[int, int, int]
"""Channels, height and width of images."""


class ImageTooSmall(Exception):
    """Pooling leaves nothing of the images."""


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


def small_conv(
    shape: Image, width: int, dropout: tuple[float, ...], norm: Norm, bias: bool
) -> nn.Sequential:
    """Return two 3x3 convolutions and 128 hidden units, for images of at least 4x4 pixels."""
    return conv_net(shape, (width, 2 * width), (3, 3), 1, (128,), dropout, norm, bias)


def alexnet(
    shape: Image, width: int, dropout: tuple[float, ...], norm: Norm, bias: bool
) -> nn.Sequential:
    """Return convolutions with kernels of 4, 3 and 2 pixels and two layers of 2048 hidden units.

    Images must have at least 19x19 pixels.
    """
    channels = (width, 2 * width, 4 * width)
    return conv_net(shape, channels, (4, 3, 2), 0, (2048, 2048), dropout, norm, bias)
