"""Residual nets of basic blocks: ResNet-18, its reduced form, and the CIFAR nets of He et al."""

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
"""Pixels a side above which the first convolution also shrinks the image."""


@dataclass(frozen=True)
class Block:
    """Two 3x3 convolutions and a way around them."""

    name: str
    inputs: int
    outputs: int
    stride: int
    shortcut: Literal["project", "pad"]
    """Where sizes change: a 1x1 convolution, or subsampling with zero channels (option A)."""

    @property
    def changes(self) -> bool:
        """What goes in has another shape than what comes out."""
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
        if not self.changes or self.shortcut == "pad":
            return None
        name = f"{self.name}.downsample.0"
        return conv_layer(name, self.inputs, self.outputs, 1, self.stride, 0, bias=False)

    @property
    def layers(self) -> tuple[Layer, ...]:
        """Its convolutions, the shortcut's last."""
        return (*self.convs, self.projection) if self.projection else self.convs

    @property
    def norms(self) -> dict[str, int]:
        """Channels of its norms, by name."""
        names = [f"{self.name}.bn1", f"{self.name}.bn2"]
        return dict.fromkeys(names + [self._around_norm] * bool(self.projection), self.outputs)

    @property
    def _around_norm(self) -> str:
        return f"{self.name}.downsample.1"

    def __call__(self, params: Tensors, x: Tensor, fwd: ForwardPass, norm: Norm) -> Tensor:
        """Apply it."""
        out = norm(params, self.convs[0](params, x, fwd), fwd, f"{self.name}.bn1")
        out = self.convs[1](params, torch.relu(out), fwd)
        out = norm(params, out, fwd, f"{self.name}.bn2")
        return torch.relu(out + self._around(params, x, fwd, norm))

    def _around(self, params: Tensors, x: Tensor, fwd: ForwardPass, norm: Norm) -> Tensor:
        if self.projection:
            return norm(params, self.projection(params, x, fwd), fwd, self._around_norm)
        return self._padded(x) if self.changes else x

    def _padded(self, x: Tensor) -> Tensor:
        missing = self.outputs - self.inputs
        before = missing // 2
        thinned = x[:, :, :: self.stride, :: self.stride]
        return F.pad(thinned, (0, 0, 0, 0, before, missing - before))


@dataclass(frozen=True)
class ResNet:
    """A stem, stages of blocks that halve the image and double the channels, and pooling."""

    shape: tuple[int, int, int]
    width: int
    blocks: tuple[int, ...]
    """Blocks of each stage."""
    norm: Norm
    stem: tuple[int, int] = (3, 1)
    """Kernel and stride of the first convolution."""
    stem_pool: bool = False
    """3x3 max pooling with stride 2 after the stem."""
    shortcut: Literal["project", "pad"] = "project"
    pool: int | None = None
    """Kernel of the last average pooling; None: the whole image."""
    start: InitScheme = "fan_out"

    @cached_property
    def first(self) -> Layer:
        """The stem's convolution."""
        kernel, stride = self.stem
        return conv_layer("conv1", self.shape[0], self.width, kernel, stride, kernel // 2, False)

    @cached_property
    def chain(self) -> tuple[Block, ...]:
        """All blocks in order."""
        return tuple(self._blocks())

    def _blocks(self) -> Iterator[Block]:
        inputs = self.width
        for stage, count in enumerate(self.blocks):
            outputs = self.width * 2**stage
            for place in range(count):
                stride = 2 if stage > 0 and place == 0 else 1
                name = f"layer{stage + 1}.{place}"
                yield Block(name, inputs, outputs, stride, self.shortcut)
                inputs = outputs

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """The stem's convolution and those of the blocks."""
        return (self.first, *(layer for block in self.chain for layer in block.layers))

    @property
    def feature_size(self) -> int:
        """Channels of the last stage, times what the pooling leaves of the image."""
        height, width = (self._side(side) for side in self.shape[1:])
        return self.chain[-1].outputs * height * width

    def _side(self, side: int) -> int:
        side = self.first.size(side)
        side = (side - 1) // 2 + 1 if self.stem_pool else side
        for block in self.chain:
            side = block.convs[0].size(side)
        return 1 if self.pool is None else max(side // self.pool, 1)

    def init(self, generator: torch.Generator) -> tuple[Tensors, Tensors]:
        """First parameters and buffers.

        Without norms He's start makes the signal grow with every block, so there the weights
        start smaller, as PyTorch's layers do.
        """
        norms = {"bn1": self.width}
        for block in self.chain:
            norms |= block.norms
        start = "uniform" if self.norm.kind == "none" else self.start
        return init_body(self.layers, norms, self.norm, generator, start)

    def features(self, params: Tensors, x: Tensor, fwd: ForwardPass) -> Tensor:
        """The last stage, pooled and flattened."""
        x = torch.relu(self.norm(params, self.first(params, x, fwd), fwd, "bn1"))
        if self.stem_pool:
            x = F.max_pool2d(x, 3, stride=2, padding=1)
        for block in self.chain:
            x = block(params, x, fwd, self.norm)
        return self._pooled(x).flatten(1)

    def _pooled(self, x: Tensor) -> Tensor:
        if self.pool is None:
            return x.mean((2, 3))
        return F.avg_pool2d(x, (min(self.pool, x.shape[2]), min(self.pool, x.shape[3])))


def resnet18(shape: tuple[int, int, int], width: int, norm: Norm) -> ResNet:
    """ResNet-18; images of 64 pixels or less are not shrunk before the first stage."""
    large = max(shape[1:]) > _LARGE
    return ResNet(shape, width, (2, 2, 2, 2), norm, (7, 2) if large else (3, 1), stem_pool=large)


def reduced_resnet18(shape: tuple[int, int, int], width: int, norm: Norm) -> ResNet:
    """The narrow ResNet-18 of FOT's appendix F.3: 20 channels, 2x2 pooling before the head."""
    stem = (3, 2 if max(shape[1:]) > _LARGE else 1)
    return ResNet(shape, width, (2, 2, 2, 2), norm, stem, pool=2, start="uniform")


def cifar_resnet(shape: tuple[int, int, int], width: int, norm: Norm, depth: int) -> ResNet:
    """ResNet-20 or -32 of He et al. for small images: three stages, shortcuts of option A."""
    count = (depth - 2) // 6
    return ResNet(shape, width, (count,) * 3, norm, shortcut="pad", start="fan_in")
