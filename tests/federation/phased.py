"""A method with exchanges of every kind, to compare engines with."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from perdure.contract import (
    ClientResult,
    Diagnosis,
    Exchange,
    Method,
    OncePerTask,
    Prepared,
    Proximal,
    Sum,
    Train,
)


@dataclass(frozen=True)
class Found:
    """Server state: the results of exchanges."""

    counts: Tensor = field(default_factory=lambda: torch.zeros(10))
    visits: float = 0.0
    ever: float = 0.0
    now: int = 0
    opened: int = -1


@dataclass(frozen=True)
class Own:
    """Client state."""

    rounds: int = 0
    tasks: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Phased(Method):
    """FedProx with a strength that depends on what was exchanged before training."""

    ServerState: ClassVar[type] = Found
    ClientState: ClassVar[type] = Own

    def exchanges(self, context):
        return [
            Exchange("open", "none", aggregate=self.opened),
            Exchange("count", broadcast=self.send, client_work=self.count, aggregate=self.counted),
            Train(broadcast=self.send, prepare=self.hold_near, make_upload=self.upload),
            Exchange("note", client_work=self.note),
            Exchange("visit", "ever", client_work=self.visit, aggregate=self.visited),
        ]

    def opened(self, server, uploads, context):
        return replace(server, state=replace(server.state, opened=context.task))

    def send(self, server, context):
        assert server.state.opened == context.task
        return {"opened": OncePerTask(torch.tensor(server.state.opened))}

    def count(self, client):
        assert (client.context.round, client.context.exchange) == (0, -2)
        assert int(client.broadcast["opened"]) == client.context.task
        counts = torch.bincount(client.data.targets[client.data.index], minlength=10)
        return ClientResult({"counts": Sum({"n": counts.float()}, 1.0)})

    def counted(self, server, uploads, context):
        return replace(server, state=replace(server.state, counts=uploads.total("counts")["n"]))

    def hold_near(self, client):
        strength = 0.01 * (1 + client.state.rounds + 3 * len(client.state.tasks))
        return Prepared(transforms=(Proximal(client.params, strength),))

    def upload(self, client, local):
        return ClientResult({}, replace(client.state, rounds=client.state.rounds + 1))

    def note(self, client):
        assert client.context.round == client.context.rounds
        return ClientResult(state=replace(client.state, tasks=[*client.state.tasks, client.id]))

    def visit(self, client):
        rounds = torch.tensor(float(client.state.rounds))
        return ClientResult({"visit": Sum({"n": rounds}, 1.0)})

    def visited(self, server, uploads, context):
        visits, now = float(uploads.total("visit")["n"]), context.clients_with_data
        ever = uploads.weights["visit"]
        return replace(server, state=replace(server.state, visits=visits, ever=ever, now=now))

    def diagnose(self, server, context):
        state = server.state
        return Diagnosis({"ever": state.ever, "now": state.now, "visits": state.visits})
