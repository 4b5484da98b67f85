"""Methods that do harm on purpose: each client goes wrong in a round of its own."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch

from perdure.federation.messages import Sum
from perdure.methods.base import Finish, Method


@dataclass(frozen=True)
class Misbehaving(Method):
    """FedAvg whose client 2 answers wrongly, in another way in each round."""

    def finish(self, client, update, buffers):
        done = super().finish(client, update, buffers)
        if client.id != 2:
            return done
        first = next(iter(update))
        match client.place.round:
            case 0:
                changed = update | {first: update[first] * float("nan")}
            case 1:
                changed = update | {first: torch.zeros(3, 3)}
            case 2:
                changed = update | {"huge": torch.zeros(20_000_000)}
            case 3:
                import perdure.engines.flower.wire as wire

                wire.encode = lambda tree: b"garbage"
                changed = update
            case 4:
                raise ValueError("this client breaks down")
            case _:
                changed = update
        return Finish({"update": Sum(changed)})


@dataclass(frozen=True)
class Slow(Method):
    """FedAvg whose client 1 takes very long in round 1; a file says when it has begun."""

    flag: str
    seconds: float

    def finish(self, client, update, buffers):
        if client.id == 1 and client.place.round == 1 and not Path(self.flag).exists():
            Path(self.flag).touch()
            time.sleep(self.seconds)
        return super().finish(client, update, buffers)
