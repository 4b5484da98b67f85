"""Clients trained per second by each engine, relative to a bare PyTorch loop.

    python -m benchmarks engine --out engine.json

The reference is `bare_loop` below: load weights, SGD steps, read weights back, no framework; its
batches are prepared as float tensors. The contenders run in turns, each turn starting with another
one, and a ratio is computed within every turn, so that a slow moment of the machine affects all of
them. The result is the median of these ratios; the best times are written, too.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.turns import median_ratio, timed_turns
from perdure.config import TrainConfig, parse
from perdure.contract import Client, ClientData, Context, Method
from perdure.contract.exchanges import split_exchanges
from perdure.contract.uploads import Nothing
from perdure.core.rng import Rng
from perdure.data.examples import Examples, Normalization
from perdure.methods.fedavg import FedAvg
from perdure.models.network import Network, Outputs, make_network
from perdure.training.engines.auto import AutoEngine
from perdure.training.engines.engine import Engine
from perdure.training.engines.serial import SerialEngine
from perdure.training.engines.vector import VectorEngine
from perdure.training.local_training import LocalTraining

CLASSES = 10


@dataclass(frozen=True)
class Work:
    """One row of the table."""

    name: str
    model: dict[str, Any]
    shape: tuple[int, ...]
    clients: int
    batch: int
    steps: int
    serial_bound: float
    vector_bound: float


TABLE = [
    Work("MLP 64-100-100-10, batch 16, 50 clients, 10 steps",
         {"hidden": [100, 100]}, (1, 8, 8), 50, 16, 10, 0.9, 6.0),
    Work("MLP 784-100-100-100-10, batch 32, 32 clients, 8 steps",
         {"hidden": [100, 100, 100]}, (1, 28, 28), 32, 32, 8, 0.95, 3.0),
    Work("MLP 784-400-400-400-10, batch 64, 32 clients, 8 steps",
         {"hidden": [400, 400, 400]}, (1, 28, 28), 32, 64, 8, 0.95, 1.3),
    Work("small conv net 28x28, batch 32, 16 clients, 4 steps",
         {"kind": "conv"}, (1, 28, 28), 16, 32, 4, 0.95, 1.2),
]  # fmt: skip


def make_round(work: Work, method: Method) -> tuple[LocalTraining, list[Client]]:
    """Return a round of a method on random images, each client with `steps` full batches."""
    outputs = Outputs("shared", CLASSES, (tuple(range(CLASSES)),))
    network = make_network(parse({"model": work.model}).model, work.shape, outputs)
    params, buffers = network.init(Rng(0).torch_generator("init"))
    train = TrainConfig(batch_size=work.batch, lr=0.01)
    shapes = {name: value.shape for name, value in params.items()}
    context = Context(
        network, Rng(0), 0, 0, 1, train.lr, work.clients, work.clients, shapes, tuple(shapes)
    )
    exchange, sent = split_exchanges(method.exchanges(context)).train, {"params": params}
    training = LocalTraining(exchange, context, train, params, buffers, sent)
    count, pixels = work.batch * work.steps, int(torch.Size(work.shape).numel())
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(
        0, 256, (count * work.clients, *work.shape), dtype=torch.uint8, generator=generator
    )  # fmt: skip
    targets = torch.randint(0, CLASSES, (len(rows),), generator=generator)
    normalization = Normalization(torch.full((pixels,), 1 / 255), torch.zeros(pixels))
    examples = Examples(rows, targets, normalization=normalization)
    data = [
        ClientData(examples, torch.arange(k * count, (k + 1) * count), targets, None)
        for k in range(work.clients)
    ]
    clients = [
        Client(k, context, own, Nothing(), 1.0, params, buffers, sent) for k, own in enumerate(data)
    ]
    return training, clients


def bare_net(work: Work, network: Network) -> nn.Module:
    """Build the same architecture from plain modules, with parameters in the same order."""
    if work.model.get("kind", "mlp") == "mlp":
        sizes = [int(torch.Size(work.shape).numel()), *work.model["hidden"]]
        parts: list[nn.Module] = [nn.Flatten()]
        for inputs, outputs in pairwise(sizes):
            parts += [nn.Linear(inputs, outputs), nn.ReLU()]
        return nn.Sequential(*parts, nn.Linear(sizes[-1], CLASSES))
    first, second, hidden = network.layers  # conv, conv, linear
    return nn.Sequential(
        *_conv(first), *_conv(second), nn.Flatten(),
        nn.Linear(hidden.inputs, hidden.outputs), nn.ReLU(), nn.Linear(hidden.outputs, CLASSES),
    )  # fmt: skip


def _conv(layer: Any) -> list[nn.Module]:
    inputs = layer.shape[1]
    conv = nn.Conv2d(inputs, layer.outputs, layer.kernel, padding=layer.geometry.padding)
    return [conv, nn.ReLU(), nn.MaxPool2d(2)]


def bare_loop(net: nn.Module, start: list[Tensor], data: list[list[Any]], lr: float) -> list[Any]:
    """Load weights, SGD steps, read weights back."""
    results = []
    for batches in data:
        with torch.no_grad():
            for parameter, value in zip(net.parameters(), start, strict=True):
                parameter.copy_(value)
        optimizer = torch.optim.SGD(net.parameters(), lr=lr)
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        results.append([parameter.detach().clone() for parameter in net.parameters()])
    return results


def engine_round(engine: Engine, training: LocalTraining, clients: list[Client]) -> None:
    """Train a round with an engine, from weights to uploads."""
    for _ in engine.train(training, clients, lambda client, state, private: None):
        pass


def contenders(work: Work) -> dict[str, Callable[[], object]]:
    """Return the functions that are timed against each other on the work of one row."""
    training, clients = make_round(work, FedAvg())
    net = bare_net(work, training.context.network)
    start = list(training.params.values())
    data = [[(b.x, b.y) for b in client.data.batches(work.batch)] for client in clients]
    assert [p.shape for p in net.parameters()] == [p.shape for p in start]
    serial, vector, auto = SerialEngine(), VectorEngine(), AutoEngine()
    return {
        "bare": lambda: bare_loop(net, start, data, training.train_config.lr),
        "serial": lambda: engine_round(serial, training, clients),
        "vector": lambda: engine_round(vector, training, clients),
        "auto": lambda: engine_round(auto, training, clients),
    }


def measure(training: Work, repeats: int) -> dict[str, Any]:
    """One row of the table."""
    seconds = timed_turns(contenders(training), repeats)
    serial = median_ratio(seconds["bare"], seconds["serial"])
    vector = median_ratio(seconds["bare"], seconds["vector"])
    better = "serial" if serial > vector else "vector"
    auto = median_ratio(seconds[better], seconds["auto"])
    return {
        "work": training.name,
        "best_seconds": {name: round(min(turns), 5) for name, turns in seconds.items()},
        "serial_vs_bare": round(serial, 2),
        "serial_bound": training.serial_bound,
        "vector_vs_bare": round(vector, 2),
        "vector_bound": training.vector_bound,
        "auto_vs_better": round(auto, 2),
        "auto_bound": 0.95,
        "met": bool(
            serial >= training.serial_bound and vector >= training.vector_bound and auto >= 0.95
        ),
    }


def main(repeats: int = 40) -> dict[str, Any]:
    """All rows."""
    return {
        "benchmark": "engine",
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "machine": {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "statistic": f"median over {repeats} turns of the ratio within a turn",
        "rows": [measure(training, repeats) for training in TABLE],
    }
