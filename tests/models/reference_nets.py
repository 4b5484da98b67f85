"""The bodies as torch.nn modules with the same parameter names."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Mlp(nn.Module):
    """Flat input, hidden layers with ReLU."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self.depth = len(sizes) - 1
        for i in range(self.depth):
            self.add_module(f"fc{i + 1}", nn.Linear(sizes[i], sizes[i + 1]))

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        for i in range(self.depth):
            x = self.get_submodule(f"fc{i + 1}")(x).relu()
        return x


class Small(nn.Module):
    """conv-pool-conv-pool-fc128."""

    def __init__(self, channels: int, side: int, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, padding=1)
        self.fc1 = nn.Linear(2 * width * (side // 4) ** 2, 128)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.conv1(x).relu(), 2)
        x = F.max_pool2d(self.conv2(x).relu(), 2)
        return self.fc1(x.flatten(1)).relu()


class AlexNet(nn.Module):
    """Three convolutions of 4, 3 and 2 pixels with batch norm, two layers of 2048."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 4, bias=False)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, bias=False)
        self.conv3 = nn.Conv2d(2 * width, 4 * width, 2, bias=False)
        self.fc1 = nn.Linear(4 * width * 4, 2048, bias=False)
        self.fc2 = nn.Linear(2048, 2048, bias=False)
        for i, channels in enumerate((width, 2 * width, 4 * width, 2048, 2048)):
            kind = nn.BatchNorm2d if i < 3 else nn.BatchNorm1d
            self.add_module(f"bn{i + 1}", kind(channels))

    def forward(self, x: Tensor) -> Tensor:
        for i in (1, 2, 3):
            x = self.get_submodule(f"bn{i}")(self.get_submodule(f"conv{i}")(x))
            x = F.max_pool2d(x.relu(), 2)
        x = self.bn4(self.fc1(x.flatten(1))).relu()
        return self.bn5(self.fc2(x)).relu()


class Basic(nn.Module):
    """A basic block with a projecting or a padding shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int, pad: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.padding = outputs // 4 if stride == 2 and pad else 0
        if stride == 2 and not pad:
            project = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.downsample = nn.Sequential(project, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        around = x
        if self.padding:
            around = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.padding, self.padding))
        elif hasattr(self, "downsample"):
            around = self.downsample(x)
        out = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))
        return (out + around).relu()


class Residual(nn.Module):
    """Any of the residual nets."""

    def __init__(
        self,
        width: int,
        blocks: list[int],
        pad: bool = False,
        large: bool = False,
        pool: int = 0,
        channels: int = 3,
    ) -> None:
        super().__init__()
        self.large, self.pool = large, pool
        kernel, stride = (7, 2) if large else (3, 1)
        self.conv1 = nn.Conv2d(channels, width, kernel, stride, kernel // 2)
        self.conv1.bias = None
        self.bn1 = nn.BatchNorm2d(width)
        inputs = width
        for stage, count in enumerate(blocks):
            stage_blocks = []
            for index in range(count):
                stride = 2 if stage and not index else 1
                stage_blocks.append(Basic(inputs, width * 2**stage, stride, pad))
                inputs = width * 2**stage
            self.add_module(f"layer{stage + 1}", nn.Sequential(*stage_blocks))
        self.stages = len(blocks)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn1(self.conv1(x)).relu()
        x = F.max_pool2d(x, 3, 2, 1) if self.large else x
        for stage in range(self.stages):
            x = self.get_submodule(f"layer{stage + 1}")(x)
        x = F.avg_pool2d(x, self.pool) if self.pool else F.adaptive_avg_pool2d(x, 1)
        return torch.flatten(x, 1)
