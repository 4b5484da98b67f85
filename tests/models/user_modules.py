"""Modules as users write them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class WithHead(nn.Module):
    """A body and a head."""

    def __init__(self, body: nn.Module, features: int, classes: int = 10) -> None:
        super().__init__()
        self.body, self.out = body, nn.Linear(features, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.body(x))


class ConvNorm(nn.Module):
    """Convolutions with batch norm and dropout, in the order of the built-in conv net."""

    def __init__(self, width: int = 4, dropout: float = 0.2) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, padding=1)
        self.fc1 = nn.Linear(2 * width * 4, 128)
        self.bn1, self.bn2 = nn.BatchNorm2d(width), nn.BatchNorm2d(2 * width)
        self.bn3, self.drop = nn.BatchNorm1d(128), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm in (self.conv1, self.bn1), (self.conv2, self.bn2):
            x = F.max_pool2d(self.drop(norm(conv(x)).relu()), 2)
        return self.drop(self.bn3(self.fc1(x.flatten(1))).relu())


class Block(nn.Module):
    """A transformer block; `first` computes the first token alone."""

    def __init__(self, width: int, heads: int, first: bool) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-12), nn.LayerNorm(width, eps=1e-12)
        self.heads, self.first = heads, first

    def forward(self, x: Tensor) -> Tensor:
        rows, count, width = x.shape
        qkv = self.qkv(self.norm1(x)).reshape(rows, count, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        if self.first:
            x, query = x[:, :1], query[:, :, :1]
        mixed = F.scaled_dot_product_attention(query, key, value)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class Vit(nn.Module):
    """A vision transformer, the features of which are its first token."""

    def __init__(self, width: int = 16, heads: int = 2, depth: int = 2, patch: int = 4) -> None:
        super().__init__()
        self.patch, self.depth = nn.Conv2d(1, width, patch, patch), depth
        self.cls = nn.Parameter(torch.randn(width))
        self.positions = nn.Parameter(torch.randn((8 // patch) ** 2 + 1, width))
        for i in range(depth):
            self.add_module(f"block{i}", Block(width, heads, first=i == depth - 1))
        self.norm = nn.LayerNorm(width, eps=1e-12)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), 1, -1), x], dim=1) + self.positions
        for i in range(self.depth):
            x = self.get_submodule(f"block{i}")(x)
        return self.norm(x)[:, 0]


class OddConvs(nn.Module):
    """Unequal, dilated, grouped, strided, depthwise and reflecting convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.unequal = nn.Conv2d(1, 8, (3, 5), stride=(1, 2), padding=(1, 2))
        self.dilated = nn.Conv2d(8, 8, 3, padding=2, dilation=2, groups=4)
        self.strided = nn.Conv2d(8, 12, 1, stride=2)
        self.depthwise = nn.Conv2d(12, 12, 3, padding=1, groups=12)
        self.reflect = nn.Conv2d(12, 6, 3, padding="same", padding_mode="reflect")
        self.even = nn.Conv2d(6, 6, 2, padding="same")
        self.fc = nn.Linear(6, 10)

    def forward(self, x: Tensor) -> Tensor:
        for conv in (self.unequal, self.dilated, self.strided, self.depthwise, self.reflect):
            x = torch.tanh(conv(x))
        return self.fc(self.even(x).flatten(2).mean(2))


class Functional(nn.Module):
    """Functions instead of modules, and log probabilities as output."""

    def __init__(self, dropout: float = 0.25) -> None:
        super().__init__()
        self.conv, self.rate = nn.Conv2d(1, 4, 3), dropout
        self.weight = nn.Parameter(torch.randn(20, 144) / 12)
        self.fc2, self.fc3 = nn.Linear(20, 12), nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout2d(F.relu(self.conv(x)), self.rate, training=self.training)
        x = F.linear(x.flatten(1), self.weight).tanh()
        x = F.dropout(x, self.rate, training=self.training)
        x = F.linear(x, self.fc2.weight, self.fc2.bias).tanh()
        return F.log_softmax(self.fc3(x), dim=1)


class Tied(nn.Module):
    """Two layers with one weight, one of them used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(64, 12), nn.Linear(12, 12), nn.Linear(12, 12)
        self.c.weight, self.out = self.b.weight, nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x.flatten(1)).tanh()
        return self.out(self.b(self.c(self.b(x).tanh()).tanh()).tanh())


class Encoder(nn.Module):
    """PyTorch's transformer encoder over the rows of an image."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.inputs = nn.Linear(8, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.out = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.encoder(self.inputs(x.flatten(1).reshape(-1, 8, 8))).mean(1))


class Recurrent(nn.Module):
    """An LSTM over the rows of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(8, 12, batch_first=True), nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(x.squeeze(1))[0][:, -1])


class Sequence(nn.Module):
    """A convolution over sequences, with batch norm and group norm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv1d(8, 8, 3, padding=1), nn.BatchNorm1d(8)
        self.gn, self.out = nn.GroupNorm(2, 8), nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.gn(torch.tanh(self.bn(self.conv(x.squeeze(1))))).mean(2))


class InPlace(nn.Module):
    """An activation that changes a recorded input afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.relu, self.out = nn.ReLU(inplace=True), nn.Linear(4, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        y = self.b(x)
        x = F.relu(x) if torch.is_grad_enabled() else F.relu_(x)
        return self.out((x + self.relu(y)).mean((2, 3)))


class BranchOnValues(nn.Module):
    """Python code that depends on values, which cannot be stacked."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(64, 12), nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc(x.flatten(1))
        return self.out(x * 2 if float(self.fc.weight.sum()) > 0 else x)
