"""A client whose upload is not finite goes on with what it kept before."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from perdure.config import parse
from perdure.federation.experiment import prepare
from perdure.federation.loop import run_stream
from perdure.federation.messages import Sum
from perdure.methods.base import Client, Finish, Method
from perdure.trees import Tensors


@dataclass(frozen=True)
class Counts(Method):
    """Client 1's second report is not a number; all count their reports."""

    def finish(self, client: Client, update: Tensors, buffers: Tensors) -> Finish:
        seen = client.kept.get("seen", 0) + 1
        if client.id == 1 and client.place.round == 1:
            update = {name: torch.full_like(value, float("nan")) for name, value in update.items()}
            seen = -100
        return Finish({"update": Sum(update)}, {"seen": seen})


def test_what_a_rejected_client_would_keep_is_not_kept() -> None:
    values = {
        "data": {"limit": 60},
        "stream": {"tasks": 1},
        "clients": {"count": 3},
        "model": {"hidden": [4]},
        "method": {"kind": f"{__name__}.Counts"},
        "train": {"rounds": 3},
        "engine": {"kind": "serial"},
    }
    experiment = prepare(parse(values))
    state = run_stream(experiment, experiment.start(), lambda *_: None)
    assert [experiment.store.get(client)["seen"] for client in range(3)] == [3, 2, 3]
    assert state.counts.rejected == [{"task": 0, "round": 1, "client": 1}]
