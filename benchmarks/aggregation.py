"""Seconds to aggregate the updates of a round by each rule of train.aggregation.

    python -m benchmarks aggregation --out aggregation.json

50 clients send 1,000,000 floats each, in four tensors. The clock runs from the first upload that
the server adds to the aggregated update, in one thread.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from perdure.config import parse
from perdure.config.train import Aggregation
from perdure.contract.uploads import StackedUploads, Sum, stack_of_one
from perdure.training.collector import UploadCollector

CLIENTS, TURNS = 50, 5
SHAPES = {
    "fc1.weight": (784, 1000),
    "fc1.bias": (1000,),
    "fc2.weight": (1000, 214),
    "rest": (1000,),
}
BOUND = 4.0


def main(clients: int = CLIENTS, turns: int = TURNS) -> dict[str, Any]:
    """Return the seconds of every rule."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        uploads = [_upload(client) for client in range(clients)]
        rules = {kind: _seconds(kind, uploads, turns) for kind in Aggregation.registry().builtin}
    finally:
        torch.set_num_threads(threads)
    return {
        "benchmark": "aggregation",
        "statistic": f"median of {turns} turns",
        "clients": clients,
        "floats": sum(torch.Size(shape).numel() for shape in SHAPES.values()),
        "rules": rules,
        "bound": BOUND,
        "met": all(rule["median_seconds"] <= BOUND for rule in rules.values()),
    }


def _upload(client: int) -> StackedUploads:
    generator = torch.Generator().manual_seed(client)
    update = {n: 0.01 * torch.randn(shape, generator=generator) for n, shape in SHAPES.items()}
    return stack_of_one(client, 1.0, {"update": Sum(update)})


def _seconds(kind: str, uploads: list[StackedUploads], turns: int) -> dict[str, Any]:
    rule = parse({"train": {"aggregation": kind}}).train.aggregation
    seconds = [_turn(rule, uploads) for _ in range(turns)]
    return {
        "median_seconds": round(statistics.median(seconds), 3),
        "seconds": [round(each, 3) for each in seconds],
    }


def _turn(rule: Aggregation, uploads: list[StackedUploads]) -> float:
    start = time.perf_counter()
    collector = UploadCollector()
    collector.rule = None if rule.is_sum else rule
    for upload in uploads:
        collector.add(upload)
    collector.close()
    collector.collected.mean("update")
    return time.perf_counter() - start
