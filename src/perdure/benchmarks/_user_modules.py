"""Modules as users write them, with the architectures of built-in networks."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CLASSES = 10


def mlp(inputs: int, hidden: list[int]) -> nn.Module:
    parts: list[nn.Module] = [nn.Flatten()]
    for before, after in pairwise([inputs, *hidden]):
        parts += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*parts, nn.Linear(hidden[-1], CLASSES))


class Conv(nn.Module):
    """The small conv net, with the activation after pooling, as the built-in one computes it."""

    def __init__(self, side: int, width: int = 16) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, padding=1)
        self.fc1 = nn.Linear(2 * width * (side // 4) ** 2, 128)
        self.fc2 = nn.Linear(128, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2(x), 2))
        out: Tensor = self.fc2(F.relu(self.fc1(x.flatten(1))))
        return out


class FunctionalConv(Conv):
    """The same with a dropout function, which must be replaced while the module is called."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.dropout(x, 0.0, training=self.training))


class Block(nn.Module):
    """A basic block with a padding shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.stride, self.missing = stride, outputs - inputs

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        if self.stride != 1 or self.missing:
            before = self.missing // 2
            x = x[:, :, :: self.stride, :: self.stride]
            x = F.pad(x, (0, 0, 0, 0, before, self.missing - before))
        return F.relu(out + x)


class ResNet20(nn.Module):
    """ResNet-20 with batch norm."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        blocks, inputs = [], width
        for stage in range(3):
            for index in range(3):
                stride = 2 if stage and not index else 1
                blocks.append(Block(inputs, width * 2**stage, stride))
                inputs = width * 2**stage
        self.blocks, self.fc = nn.Sequential(*blocks), nn.Linear(inputs, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(F.relu(self.bn1(self.conv1(x))))
        out: Tensor = self.fc(x.mean((2, 3)))
        return out


class Attention(nn.Module):
    """A transformer block over all tokens."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm1, self.norm2, self.heads = nn.LayerNorm(width), nn.LayerNorm(width), heads

    def forward(self, x: Tensor) -> Tensor:
        rows, count, width = x.shape
        qkv = self.qkv(self.norm1(x)).reshape(rows, count, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        out: Tensor = x + self.fc2(F.gelu(self.fc1(self.norm2(x))))
        return out


class Vit(nn.Module):
    """A vision transformer as users write it: the last block computes all tokens."""

    def __init__(self, side: int, width: int, depth: int, heads: int, patch: int) -> None:
        super().__init__()
        self.patch = nn.Conv2d(1, width, patch, patch)
        self.cls = nn.Parameter(torch.zeros(width))
        self.positions = nn.Parameter(torch.randn((side // patch) ** 2 + 1, width) * 0.02)
        self.blocks = nn.Sequential(*(Attention(width, heads) for _ in range(depth)))
        self.norm, self.fc = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), 1, -1), x], dim=1) + self.positions
        out: Tensor = self.fc(self.norm(self.blocks(x))[:, 0])
        return out
