"""A client whose upload is not finite keeps its previous state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from perdure.config import parse
from perdure.contract import (
    Client,
    ClientResult,
    Context,
    Exchange,
    LocalUpdate,
    Method,
    Sum,
    Train,
)
from perdure.training.experiment import build_experiment
from perdure.training.loop import run_stream


@dataclass(frozen=True)
class Seen:
    """Reports so far."""

    count: int = 0


@dataclass(frozen=True)
class Counted(Method):
    """Client 1's second report is not a number; all count their reports."""

    ClientState: ClassVar[type] = Seen

    def exchanges(self, context: Context) -> list[Exchange | Train]:
        return [Train(make_upload=self.upload)]

    def upload(self, client: Client, local: LocalUpdate) -> ClientResult:
        update, seen = local.update, client.state.count + 1
        if client.id == 1 and client.context.round == 1:
            update = {name: torch.full_like(value, float("nan")) for name, value in update.items()}
            seen = -100
        return ClientResult({"update": Sum(update)}, Seen(seen))


def test_a_client_with_a_rejected_upload_keeps_its_previous_state() -> None:
    values = {
        "data": {"limit": 60},
        "stream": {"tasks": 1},
        "clients": {"count": 3},
        "model": {"hidden": [4]},
        "method": {"kind": f"{__name__}.Counted"},
        "train": {"rounds": 3},
        "engine": {"kind": "serial"},
    }
    experiment = build_experiment(parse(values))
    state = run_stream(experiment, experiment.initial_state(), lambda *_: None)
    assert [experiment.client_state(client)[0].count for client in range(3)] == [3, 2, 3]
    assert state.counters.rejected == [{"task": 0, "round": 1, "client": 1}]
