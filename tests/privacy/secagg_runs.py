"""Secure sums among a few clients, with everything that travelled written down."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from perdure.contract.uploads import CollectedUploads, Sum, Upload
from perdure.privacy.secagg.client import SecAggClient
from perdure.privacy.secagg.errors import MalformedMessage
from perdure.privacy.secagg.fixed_point import FixedPoint
from perdure.privacy.secagg.keys import TaskKeys
from perdure.privacy.secagg.server import SecAggServer, finish
from perdure.privacy.secagg.transport import min_survivors
from perdure.privacy.secagg.wire import DropoutRequest, Session, SumRequest, decode, encode

Values = dict[int, np.ndarray[Any, Any]]


@dataclass
class Group:
    """Clients that agreed on keys; their masters are fixed, so that no test is left to chance."""

    count: int
    task: int = 0
    people: dict[int, SecAggClient] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for client in range(self.count):
            rng = np.random.default_rng([self.count, self.task, client])
            self.people[client] = SecAggClient(TaskKeys(client, rng.bytes(32)))

    def call(self, **changes: Any) -> SumRequest:
        keys = {client: person.keys.public for client, person in self.people.items()}
        usual: dict[str, Any] = {
            "session": Session(self.task, 0),
            "keys": keys,
            "threshold": min_survivors(self.count, 0.6),
            "grid": FixedPoint(64, 30, self.count),
        }
        return SumRequest(**{**usual, **changes})


@dataclass
class Sums:
    """One secure sum. `gone`: clients that drop out before uploads, settling or opening."""

    group: Group
    call: SumRequest
    values: Values
    weights: dict[int, float]
    gone: tuple[set[int], set[int], set[int]] = (set(), set(), set())
    received: dict[int, bytes] = field(default_factory=dict)
    asked: list[dict[int, bytes]] = field(default_factory=list)
    answered: list[dict[int, bytes]] = field(default_factory=list)

    def uploads(self) -> SecAggServer:
        aggregator, call = SecAggServer(self.call), encode(self.call)
        for client, person in self.group.people.items():
            if client not in self.gone[0]:
                fields = upload(self.values[client])
                self.received[client] = person.upload(call, fields, self.weights[client])
                aggregator.receive(client, self.received[client])
        return aggregator

    def ask(self, requests: dict[int, bytes]) -> dict[int, bytes]:
        missing = self.gone[0] | self.gone[1]
        try:
            decode(next(iter(requests.values())), DropoutRequest)
        except MalformedMessage:
            missing = missing | self.gone[2]
        people = self.group.people
        answers = {c: people[c].answer(text) for c, text in requests.items() if c not in missing}
        self.asked.append(requests)
        self.answered.append(answers)
        return answers

    def report(self) -> CollectedUploads:
        return finish(self.uploads(), self.ask)


def upload(values: np.ndarray[Any, Any]) -> Upload:
    """A weighted field of two tensors and one with a weight of its own."""
    half = len(values) // 2
    first, second = torch.from_numpy(values[:half]), torch.from_numpy(values[half:])
    return {
        "update": Sum({"a": first.view(-1, 1), "b": second}),
        "count": Sum({"n": first[:1].sum()}, weight=1.0),
    }


def random_sums(group: Group, call: SumRequest | None = None, size: int = 9, **more: Any) -> Sums:
    rng = np.random.default_rng(7)
    values = {client: rng.normal(size=size) for client in group.people}
    weights = {client: float(rng.integers(1, 90)) for client in group.people}
    return Sums(group, call or group.call(), values, weights, **more)


def expect(sums: Sums, report: CollectedUploads, members: list[int]) -> None:
    """The report is the plain weighted sum over the members, to half a step a client."""
    step = sums.call.grid.step
    room = len(members) * step / 2 + 1e-9
    half = len(sums.values[0]) // 2
    whole = sum(sums.weights[c] * sums.values[c] for c in members)
    assert report.clients == members
    found = torch.cat([t.flatten() for t in report.total("update").values()]).numpy()
    np.testing.assert_allclose(found, whole, atol=room, rtol=0)
    first = sum(sums.values[c][0] for c in members) if half else 0.0
    np.testing.assert_allclose(float(report.total("count")["n"]), first, atol=room, rtol=0)
    assert report.weights["update"] == sum(sums.weights[c] for c in members)
    assert report.weights["count"] == len(members)
    assert report.per_client == {}
