"""Secure sums among a few clients, with a record of all messages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from perdure.contract.uploads import CollectedUploads, Sum, Upload
from perdure.privacy.secagg.client import SecAggClient
from perdure.privacy.secagg.journal import min_survivors
from perdure.privacy.secagg.keys import TaskKeys
from perdure.privacy.secagg.layout import FixedPoint
from perdure.privacy.secagg.messages import (
    DropoutRequest,
    MalformedMessage,
    Session,
    SumRequest,
    decode,
    encode,
)
from perdure.privacy.secagg.server import SecAggServer, open_sum

Values = dict[int, np.ndarray[Any, Any]]


@dataclass
class Group:
    """Clients with keys; their master secrets are fixed, so that tests do not depend on chance."""

    count: int
    task: int = 0
    secagg_clients: dict[int, SecAggClient] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for client in range(self.count):
            rng = np.random.default_rng([self.count, self.task, client])
            self.secagg_clients[client] = SecAggClient(TaskKeys(client, rng.bytes(32)))

    def request(self, **changes: Any) -> SumRequest:
        keys = {
            client: secagg_client.keys.public
            for client, secagg_client in self.secagg_clients.items()
        }
        defaults: dict[str, Any] = {
            "session": Session(self.task, 0),
            "public_keys": keys,
            "threshold": min_survivors(self.count, 0.6),
            "fixed_point": FixedPoint(64, 30, self.count),
        }
        return SumRequest(**{**defaults, **changes})


@dataclass
class Sums:
    """One secure sum. `gone`: clients that drop out before uploads, before seeds, before shares."""

    group: Group
    request: SumRequest
    values: Values
    weights: dict[int, float]
    gone: tuple[set[int], set[int], set[int]] = (set(), set(), set())
    received: dict[int, bytes] = field(default_factory=dict)
    asked: list[dict[int, bytes]] = field(default_factory=list)
    answered: list[dict[int, bytes]] = field(default_factory=list)

    def uploads(self) -> SecAggServer:
        server, request = SecAggServer(self.request), encode(self.request)
        for client, secagg_client in self.group.secagg_clients.items():
            if client not in self.gone[0]:
                fields = upload(self.values[client])
                self.received[client] = secagg_client.upload(request, fields, self.weights[client])
                server.receive_upload(client, self.received[client])
        return server

    def ask(self, requests: dict[int, bytes]) -> dict[int, bytes]:
        missing = self.gone[0] | self.gone[1]
        try:
            decode(next(iter(requests.values())), DropoutRequest)
        except MalformedMessage:
            missing = missing | self.gone[2]
        secagg_clients = self.group.secagg_clients
        answers = {
            c: secagg_clients[c].answer(text) for c, text in requests.items() if c not in missing
        }
        self.asked.append(requests)
        self.answered.append(answers)
        return answers

    def open(self) -> CollectedUploads:
        return open_sum(self.uploads(), self.ask)


def upload(values: np.ndarray[Any, Any]) -> Upload:
    """Return a weighted field of two tensors, and a field with a separate weight."""
    half = len(values) // 2
    first, second = torch.from_numpy(values[:half]), torch.from_numpy(values[half:])
    return {
        "update": Sum({"a": first.view(-1, 1), "b": second}),
        "count": Sum({"n": first[:1].sum()}, weight=1.0),
    }


def random_sums(
    group: Group, request: SumRequest | None = None, size: int = 9, **more: Any
) -> Sums:
    rng = np.random.default_rng(7)
    values = {client: rng.normal(size=size) for client in group.secagg_clients}
    weights = {client: float(rng.integers(1, 90)) for client in group.secagg_clients}
    return Sums(group, request or group.request(), values, weights, **more)


def expect(sums: Sums, collected: CollectedUploads, survivors: list[int]) -> None:
    """Check that `collected` is the plain weighted sum, to half a step per client."""
    step = sums.request.fixed_point.step
    tolerance = len(survivors) * step / 2 + 1e-9
    half = len(sums.values[0]) // 2
    total = sum(sums.weights[c] * sums.values[c] for c in survivors)
    assert collected.clients == survivors
    values = torch.cat([t.flatten() for t in collected.total("update").values()]).numpy()
    np.testing.assert_allclose(values, total, atol=tolerance, rtol=0)
    first = sum(sums.values[c][0] for c in survivors) if half else 0.0
    np.testing.assert_allclose(float(collected.total("count")["n"]), first, atol=tolerance, rtol=0)
    assert collected.weights["update"] == sum(sums.weights[c] for c in survivors)
    assert collected.weights["count"] == len(survivors)
    assert collected.per_client == {}
