"""Residual networks of basic blocks: ResNet-18, its reduced form, and He et al.'s for CIFAR."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from perdure.core.trees import Tensors
from perdure.models.forward_pass import ForwardPass
from perdure.models.layers import InitScheme, Layer, Norm, conv_layer, init_body

_LARGE = 64
"""Side in pixels above which the first convolution also shrinks the image."""


@dataclass(frozen=True)
class Block:
    """Two 3x3 convolutions and a shortcut."""

    name: str
    """Prefix of its parameters."""
    inputs: int
    """Input channels."""
    outputs: int
    """Output channels."""
    stride: int
    """Stride of the first convolution."""
    shortcut: Literal["project", "pad"]
    """If the shape changes: a 1x1 convolution, or subsampling with zero channels (option A)."""

    @property
    def changes_shape(self) -> bool:
        """Whether input and output have different shapes."""
        return self.stride != 1 or self.inputs != self.outputs

    @cached_property
    def convs(self) -> tuple[Layer, Layer]:
        """The two convolutions."""
        first = conv_layer(
            f"{self.name}.conv1", self.inputs, self.outputs, 3, self.stride, 1, bias=False
        )
        return first, conv_layer(f"{self.name}.conv2", self.outputs, self.outputs, 3, 1, 1, False)

    @cached_property
    def projection(self) -> Layer | None:
        """The shortcut's 1x1 convolution, if it has one."""
        if not self.changes_shape or self.shortcut == "pad":
            return None
        name = f"{self.name}.downsample.0"
        return conv_layer(name, self.inputs, self.outputs, 1, self.stride, 0, bias=False)

    @property
    def layers(self) -> tuple[Layer, ...]:
        """Its convolutions, with the shortcut's at the end."""
        return (*self.convs, self.projection) if self.projection else self.convs

    @property
    def norms(self) -> dict[str, int]:
        """Channels of its norms, by name."""
        names = [f"{self.name}.bn1", f"{self.name}.bn2"]
        return dict.fromkeys(names + [self._shortcut_norm] * bool(self.projection), self.outputs)

    @property
    def _shortcut_norm(self) -> str:
        return f"{self.name}.downsample.1"

    def __call__(self, params: Tensors, x: Tensor, fwd: ForwardPass, norm: Norm) -> Tensor:
        """Return the block's output for images [batch, inputs, H, W]."""
        out = norm(params, self.convs[0](params, x, fwd), fwd, f"{self.name}.bn1")
        out = self.convs[1](params, torch.relu(out), fwd)
        out = norm(params, out, fwd, f"{self.name}.bn2")
        return torch.relu(out + self._shortcut(params, x, fwd, norm))

    def _shortcut(self, params: Tensors, x: Tensor, fwd: ForwardPass, norm: Norm) -> Tensor:
        if self.projection:
            return norm(params, self.projection(params, x, fwd), fwd, self._shortcut_norm)
        return self._padded(x) if self.changes_shape else x

    def _padded(self, x: Tensor) -> Tensor:
        missing = self.outputs - self.inputs
        before = missing // 2
        subsampled = x[:, :, :: self.stride, :: self.stride]
        return F.pad(subsampled, (0, 0, 0, 0, before, missing - before))


@dataclass(frozen=True)
class ResNet:
    """A stem, stages of blocks that halve the image and double the channels, and pooling."""

    shape: tuple[int, int, int]
    """Channels, height and width of the images."""
    width: int
    """Channels of the first stage."""
    stage_depths: tuple[int, ...]
    """Number of blocks in each stage."""
    norm: Norm
    """Norm after each convolution."""
    stem: tuple[int, int] = (3, 1)
    """Kernel and stride of the first convolution."""
    stem_pool: bool = False
    """Whether 3x3 max pooling with stride 2 follows the stem."""
    shortcut: Literal["project", "pad"] = "project"
    """Shortcut of blocks that change the shape."""
    pool: int | None = None
    """Kernel of the last average pooling. If None, the whole image."""
    init_scheme: InitScheme = "fan_out"
    """Distribution of the initial weights."""

    @cached_property
    def stem_conv(self) -> Layer:
        """The stem's convolution."""
        kernel, stride = self.stem
        return conv_layer("conv1", self.shape[0], self.width, kernel, stride, kernel // 2, False)

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """All blocks in order."""
        return tuple(self._make_blocks())

    def _make_blocks(self) -> Iterator[Block]:
        inputs = self.width
        for stage, count in enumerate(self.stage_depths):
            outputs = self.width * 2**stage
            for index in range(count):
                stride = 2 if stage > 0 and index == 0 else 1
                name = f"layer{stage + 1}.{index}"
                yield Block(name, inputs, outputs, stride, self.shortcut)
                inputs = outputs

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """The stem's convolution and those of the blocks."""
        return (self.stem_conv, *(layer for block in self.blocks for layer in block.layers))

    @property
    def feature_size(self) -> int:
        """Channels of the last stage times the pixels that pooling leaves."""
        height, width = (self._side(side) for side in self.shape[1:])
        return self.blocks[-1].outputs * height * width

    def _side(self, side: int) -> int:
        side = self.stem_conv.output_size(side)
        side = (side - 1) // 2 + 1 if self.stem_pool else side
        for block in self.blocks:
            side = block.convs[0].output_size(side)
        return 1 if self.pool is None else max(side // self.pool, 1)

    def init(self, generator: torch.Generator) -> tuple[Tensors, Tensors]:
        """Return the initial parameters and buffers.

        Without norms He's scheme makes the signal grow with every block, so the weights then have
        PyTorch's smaller default.
        """
        norms = {"bn1": self.width}
        for block in self.blocks:
            norms |= block.norms
        scheme = "uniform" if self.norm.kind == "none" else self.init_scheme
        return init_body(self.layers, norms, self.norm, generator, scheme)

    def features(self, params: Tensors, x: Tensor, fwd: ForwardPass) -> Tensor:
        """Return the last stage's output, pooled and flattened: float [batch, feature_size]."""
        x = torch.relu(self.norm(params, self.stem_conv(params, x, fwd), fwd, "bn1"))
        if self.stem_pool:
            x = F.max_pool2d(x, 3, stride=2, padding=1)
        for block in self.blocks:
            x = block(params, x, fwd, self.norm)
        return self._pooled(x).flatten(1)

    def _pooled(self, x: Tensor) -> Tensor:
        if self.pool is None:
            return x.mean((2, 3))
        return F.avg_pool2d(x, (min(self.pool, x.shape[2]), min(self.pool, x.shape[3])))


def resnet18(shape: tuple[int, int, int], width: int, norm: Norm) -> ResNet:
    """Return ResNet-18; images of up to 64x64 pixels are not shrunk before the first stage."""
    large = max(shape[1:]) > _LARGE
    return ResNet(shape, width, (2, 2, 2, 2), norm, (7, 2) if large else (3, 1), stem_pool=large)


def reduced_resnet18(shape: tuple[int, int, int], width: int, norm: Norm) -> ResNet:
    """Return the narrow ResNet-18 of FOT's appendix F.3, with 2x2 pooling before the head."""
    stem = (3, 2 if max(shape[1:]) > _LARGE else 1)
    return ResNet(shape, width, (2, 2, 2, 2), norm, stem, pool=2, init_scheme="uniform")


def cifar_resnet(shape: tuple[int, int, int], width: int, norm: Norm, depth: int) -> ResNet:
    """Return ResNet-20 or -32 of He et al. for small images, with shortcuts of option A."""
    count = (depth - 2) // 6
    return ResNet(shape, width, (count,) * 3, norm, shortcut="pad", init_scheme="fan_in")
