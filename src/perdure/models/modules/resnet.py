"""Residual networks: ResNet-18, its reduced form, and the CIFAR nets ResNet-20 and ResNet-32."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from perdure.models.layers import InitScheme
from perdure.models.modules.plain import Image, ImageModel, Norm, NormKind, sequence

# ---- The kinds

_LARGE = 64
"""Side in pixels above which the first convolution also shrinks the image."""


class ResnetModel(ImageModel):
    """Keys and facts of residual networks."""

    default_norm: ClassVar[NormKind] = "batch"


class Resnet18Model(ResnetModel):
    """ResNet-18.

    Example: `model: {kind: resnet18, init: resnet18.safetensors}`
    """

    default_width: ClassVar[int] = 64
    scheme: ClassVar[InitScheme] = "fan_out"

    def make_for(self, image: Image, width: int, norm: Norm) -> nn.Module:
        """Return ResNet-18; images of up to 64x64 pixels are not shrunk before the first stage."""
        large = max(image[1:]) > _LARGE
        stem = (7, 2) if large else (3, 1)
        return resnet(image[0], width, (2, 2, 2, 2), norm, stem, stem_pool=large)


class Resnet18ReducedModel(ResnetModel):
    """The ResNet-18 with few channels of the continual-learning literature.

    Example: `model: {kind: resnet18-reduced, running_stats: false}`
    """

    default_width: ClassVar[int] = 20

    def make_for(self, image: Image, width: int, norm: Norm) -> nn.Module:
        """Return the narrow ResNet-18 of FOT's appendix F.3, with 2x2 pooling before the head."""
        stem = (3, 2 if max(image[1:]) > _LARGE else 1)
        return resnet(image[0], width, (2, 2, 2, 2), norm, stem, pool=2)


class Resnet20Model(ResnetModel):
    """ResNet-20 for images of 32x32 pixels.

    Example: `model: {kind: resnet20}`
    """

    scheme: ClassVar[InitScheme] = "fan_in"
    depth: ClassVar[int] = 20
    """Layers of the network."""

    def make_for(self, image: Image, width: int, norm: Norm) -> nn.Module:
        """Return the network of He et al. for small images, with shortcuts of option A."""
        blocks = (self.depth - 2) // 6
        return resnet(image[0], width, (blocks,) * 3, norm, shortcut="pad")


class Resnet32Model(Resnet20Model):
    """ResNet-32 for images of 32x32 pixels.

    Example: `model: {kind: resnet32}`
    """

    depth: ClassVar[int] = 32


# ---- Their parts

Shortcut = Literal["project", "pad"]
"""If a block changes the shape: a 1x1 convolution, or subsampling with zero channels (option A)."""


class PadShortcut(nn.Module):
    """Every `stride`-th pixel, with channels of zeros on both sides."""

    def __init__(self, missing: int, stride: int) -> None:
        super().__init__()
        self.before, self.after, self.stride = missing // 2, missing - missing // 2, stride

    def forward(self, x: Tensor) -> Tensor:
        """Return images [batch, channels + missing, ...]."""
        x = x[:, :, :: self.stride, :: self.stride]
        return F.pad(x, (0, 0, 0, 0, self.before, self.after))


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    def __init__(
        self, inputs: int, outputs: int, stride: int, norm: Norm, shortcut: Shortcut
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = norm.for_images(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = norm.for_images(outputs)
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            project = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.downsample = nn.Sequential(project, norm.for_images(outputs))
            if shortcut == "pad":
                self.downsample = PadShortcut(outputs - inputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output for images [batch, inputs, height, width]."""
        out = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        return torch.relu(out + self.downsample(x))


class AveragePool(nn.Module):
    """Means over squares, or over the whole image if it is smaller."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self.side = side

    def forward(self, x: Tensor) -> Tensor:
        """Return images of a smaller size."""
        return F.avg_pool2d(x, (min(self.side, x.shape[2]), min(self.side, x.shape[3])))


def stages(
    width: int, depths: tuple[int, ...], norm: Norm, shortcut: Shortcut
) -> dict[str, nn.Module]:
    """Return the stages by name; each but the first halves the image and doubles the channels."""
    parts: dict[str, nn.Module] = {}
    inputs = width
    for stage, depth in enumerate(depths):
        outputs, stride = width * 2**stage, 2 if stage else 1
        blocks = [Block(inputs, outputs, stride, norm, shortcut)]
        blocks += [Block(outputs, outputs, 1, norm, shortcut) for _ in range(depth - 1)]
        parts[f"layer{stage + 1}"], inputs = nn.Sequential(*blocks), outputs
    return parts


def resnet(
    channels: int,
    width: int,
    depths: tuple[int, ...],
    norm: Norm,
    stem: tuple[int, int] = (3, 1),
    stem_pool: bool = False,
    shortcut: Shortcut = "project",
    pool: int | None = None,
) -> nn.Sequential:
    """Return a stem, stages of blocks, and pooling."""
    kernel, stride = stem
    return sequence({
        "conv1": nn.Conv2d(channels, width, kernel, stride, kernel // 2, bias=False),
        "bn1": norm.for_images(width),
        "relu": nn.ReLU(),
        "pool1": nn.MaxPool2d(3, 2, 1) if stem_pool else nn.Identity(),
        **stages(width, depths, norm, shortcut),
        "pool": nn.AdaptiveAvgPool2d(1) if pool is None else AveragePool(pool),
        "flatten": nn.Flatten(),
    })  # fmt: skip
