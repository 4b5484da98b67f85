"""Rounds of an nn.Module as users write it, relative to the built-in kind of its architecture.

    python -m benchmarks adapter --out adapter.json

Built-in kinds are modules, too, written for speed, except the ViT: its hand-written body computes
the last block for the head's token alone. The modules here are written otherwise than the built-in
ones: with the functions of torch, or all tokens in all blocks. Both train a round of FedAvg on
random images, in turns, on each engine. A ratio is the CPU time of the built-in network over that
of the module within a turn (1: as fast); the result is the median.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.engine import Work, engine_round, make_round
from benchmarks.turns import median_ratio, timed_turns
from perdure.methods.fedavg import FedAvg
from perdure.training.engines.engine import Engine
from perdure.training.engines.serial import SerialEngine
from perdure.training.engines.vector import VectorEngine

CLASSES = 10


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


@dataclass(frozen=True)
class Pair:
    """A built-in network and a module of the same architecture."""

    builtin: Work
    """The built-in network, its round, and the smallest ratios that are asked for."""
    module: Callable[[], nn.Module]


_VIT = {"kind": "vit", "init": "random", "width": 64, "depth": 3, "heads": 4, "patch": 7}
TABLE = [
    Pair(Work("conv net 28x28, batch 32", {"kind": "conv"}, (1, 28, 28), 8, 32, 4, 0.9, 0.65),
         lambda: Conv(28)),
    Pair(Work("conv net 28x28 with F.dropout, batch 32", {"kind": "conv"}, (1, 28, 28), 8, 32, 4,
              0.75, 0.65),
         lambda: FunctionalConv(28)),
    Pair(Work("ViT, width 64, 3 blocks, 28x28, batch 16", _VIT, (1, 28, 28), 4, 16, 4, 0.75, 0.7),
         lambda: Vit(28, 64, 3, 4, 7)),
]  # fmt: skip


def measure(pair: Pair, repeats: int) -> dict[str, Any]:
    """One row of the table."""
    work = pair.builtin
    row: dict[str, Any] = {"work": work.name}
    bounds = {"serial": work.serial_bound, "vector": work.vector_bound}
    models = {"builtin": work.model, "module": {"kind": pair.module()}}
    for name, engine in (("serial", SerialEngine), ("vector", VectorEngine)):
        rounds = {key: _round(work, model, engine()) for key, model in models.items()}
        seconds = timed_turns(rounds, repeats, warm_up=4, clock=time.process_time)
        ratio = median_ratio(seconds["builtin"], seconds["module"])
        best = {key: round(min(turns), 5) for key, turns in seconds.items()}
        row |= {f"{name}_vs_builtin": round(ratio, 2), f"{name}_bound": bounds[name],
                f"{name}_best_cpu_seconds": best, f"{name}_met": ratio >= bounds[name]}  # fmt: skip
    return row


def _round(work: Work, model: dict[str, Any], engine: Engine) -> Callable[[], object]:
    training, clients = make_round(replace(work, model=model), FedAvg())
    return lambda: engine_round(engine, training, clients)


def main(repeats: int = 20) -> dict[str, Any]:
    """All rows."""
    return {
        "benchmark": "adapter",
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "machine": {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "statistic": f"median over {repeats} turns of the ratio of CPU times within a turn",
        "rows": [measure(pair, repeats) for pair in TABLE],
    }
