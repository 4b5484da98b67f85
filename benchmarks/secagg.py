"""Seconds and additional bytes of secure aggregation, in one process.

    python -m benchmarks secagg --out secagg.json

50 clients send 80,000 floats each: keys are agreed, every client masks its values, the server adds
and unmasks the sum; once with all clients, once with five that drop out. The result is the best of
several turns, since machines are noisy; cpu_seconds do not depend on the load of the machine.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from perdure.contract.uploads import Sum, Upload
from perdure.privacy.secagg.client import SecAggClient
from perdure.privacy.secagg.journal import min_survivors
from perdure.privacy.secagg.keys import TaskKeys
from perdure.privacy.secagg.layout import FixedPoint
from perdure.privacy.secagg.messages import Session, SumRequest, encode
from perdure.privacy.secagg.server import SecAggServer, open_sum

CLIENTS, FLOATS, TURNS = 50, 80_000, 3
GONE = set(range(0, CLIENTS, 10))
PRECISIONS = {64: 30, 32: 16}
BOUNDS = {"seconds": 2.0}


def main() -> dict[str, Any]:
    """Figures of both rings, with and without dropouts."""
    values = {c: _values(c) for c in range(CLIENTS)}
    found = {
        f"{bits} bits{', five gone' if gone else ''}": _best(values, bits, gone)
        for bits in PRECISIONS
        for gone in (set(), GONE)
    }
    return {
        "benchmark": "secagg",
        "statistic": f"best of {TURNS} turns by the clock",
        "clients": CLIENTS,
        "floats": FLOATS,
        "runs": found,
        "bounds": BOUNDS,
        "met": all(run["seconds"] <= BOUNDS["seconds"] for run in found.values()),
    }


def _values(client: int) -> Upload:
    generator = torch.Generator().manual_seed(client)
    return {"update": Sum({"w": 0.01 * torch.randn(FLOATS, generator=generator)})}


def _best(values: dict[int, Upload], bits: int, gone: set[int]) -> dict[str, Any]:
    turns = [_turn(values, bits, gone) for _ in range(TURNS)]
    return min(turns, key=lambda turn: turn["seconds"])


def _turn(values: dict[int, Upload], bits: int, gone: set[int]) -> dict[str, Any]:
    wall, cpu = time.perf_counter(), time.process_time()
    clients = {client: SecAggClient(TaskKeys(client)) for client in values}
    keys = {client: secagg_client.keys.public for client, secagg_client in clients.items()}
    fixed_point = FixedPoint(bits, PRECISIONS[bits], CLIENTS)
    request = SumRequest(Session(0, 0), keys, min_survivors(CLIENTS, 0.66), fixed_point)
    encoded, server, sent = encode(request), SecAggServer(request), 0
    for client in clients.keys() - gone:
        data = clients[client].upload(encoded, values[client], 1.0)
        server.receive_upload(client, data)
        sent = len(data)
    asked: list[int] = []

    def ask(requests: dict[int, bytes]) -> dict[int, bytes]:
        asked.append(max(map(len, requests.values())))
        return {client: clients[client].answer(data) for client, data in requests.items()}

    uploads = open_sum(server, ask)
    spent = time.perf_counter() - wall
    return {
        "seconds": round(spent, 3),
        "cpu_seconds": round(time.process_time() - cpu, 3),
        "bytes_up": sent,
        "bytes_up_over_float32": round(sent / (4 * FLOATS), 3),
        "further_messages": len(asked),
        "largest_error": _error(values, uploads.total("update")["w"], uploads.clients),
    }


def _error(values: dict[int, Upload], found: torch.Tensor, clients: list[int]) -> float:
    exact = sum(
        (values[client]["update"].value["w"].double() for client in clients),
        torch.zeros((), dtype=torch.float64),
    )
    return float((found.double() - exact).abs().max())
