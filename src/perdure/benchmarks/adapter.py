"""Rounds of an nn.Module as users write it, relative to the built-in kind of its architecture.

    perdure bench adapter --out adapter.json

Built-in kinds are modules, too, written for speed, except the ViT: its hand-written body computes
the last block for the head's token alone. Both train a round of FedAvg on random images, in turns,
on each engine. A ratio is the CPU time of the built-in network over that of the module within a
turn (1: as fast); the result is the median.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from perdure.benchmarks._turns import median_ratio, timed_turns
from perdure.benchmarks._user_modules import Conv, FunctionalConv, ResNet20, Vit, mlp
from perdure.benchmarks.engine import Work, engine_round, make_round
from perdure.contract.engine import Engine
from perdure.engines.serial import SerialEngine
from perdure.engines.vector import VectorEngine
from perdure.methods.fedavg import FedAvg


@dataclass(frozen=True)
class Pair:
    """A built-in network and a module of the same architecture."""

    builtin: Work
    """The built-in network, its round, and the smallest ratios that are asked for."""
    module: Callable[[], nn.Module]


_VIT = {"kind": "vit", "init": "random", "width": 64, "depth": 3, "heads": 4, "patch": 7}
TABLE = [
    Pair(Work("MLP 64-100-100, batch 16", {"hidden": [100, 100]}, (1, 8, 8), 20, 16, 10, 0.85,
              0.65),
         lambda: mlp(64, [100, 100])),
    Pair(Work("MLP 784-400-400-400, batch 64", {"hidden": [400] * 3}, (1, 28, 28), 8, 64, 6, 0.9,
              0.65),
         lambda: mlp(784, [400] * 3)),
    Pair(Work("conv net 28x28, batch 32", {"kind": "conv"}, (1, 28, 28), 8, 32, 4, 0.9, 0.65),
         lambda: Conv(28)),
    Pair(Work("conv net 28x28 with F.dropout, batch 32", {"kind": "conv"}, (1, 28, 28), 8, 32, 4,
              0.75, 0.65),
         lambda: FunctionalConv(28)),
    Pair(Work("ResNet-20, width 8, 16x16, batch 16", {"kind": "resnet20", "width": 8},
              (3, 16, 16), 4, 16, 4, 0.9, 0.65),
         lambda: ResNet20(3, 8)),
    Pair(Work("ViT, width 64, 3 blocks, 28x28, batch 16", _VIT, (1, 28, 28), 4, 16, 4, 0.75, 0.7),
         lambda: Vit(28, 64, 3, 4, 7)),
]  # fmt: skip


def measure(pair: Pair, repeats: int) -> dict[str, Any]:
    """One row of the table."""
    work = pair.builtin
    row: dict[str, Any] = {"work": work.name}
    bounds = {"serial": work.serial_bound, "vector": work.vector_bound}
    engines: dict[str, type[SerialEngine | VectorEngine]] = {
        "serial": SerialEngine, "vector": VectorEngine,
    }  # fmt: skip
    for name, engine in engines.items():
        seconds = timed_turns(
            _contenders(pair, engine), repeats, warm_up=4, clock=time.process_time
        )
        ratio = median_ratio(seconds["builtin"], seconds["module"])
        best = {key: round(min(turns), 5) for key, turns in seconds.items()}
        row |= {f"{name}_vs_builtin": round(ratio, 2), f"{name}_bound": bounds[name],
                f"{name}_best_cpu_seconds": best, f"{name}_met": ratio >= bounds[name]}  # fmt: skip
    return row


def _contenders(
    pair: Pair, engine: type[SerialEngine | VectorEngine]
) -> dict[str, Callable[[], object]]:
    models = {"builtin": pair.builtin.model, "module": {"kind": pair.module()}}
    return {name: _round(pair.builtin, model, engine()) for name, model in models.items()}


def _round(work: Work, model: dict[str, Any], engine: Engine) -> Callable[[], object]:
    training, clients = make_round(_with_model(work, model), FedAvg())
    return lambda: engine_round(engine, training, clients)


def _with_model(work: Work, model: dict[str, Any]) -> Work:
    return Work(**{**vars(work), "model": model})


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


if __name__ == "__main__":
    print(json.dumps(main(), indent=2))
