"""An optimizer on the server: the clients' mean update as a gradient (FedAvgM, FedAdam, FedYogi).

`combine` gives the direction of the step, to which the loop applies `train.server_lr`; `adjust`
stores the moments. By default they begin anew with each task: those of the last task would push the
model on in a direction that has lost its meaning.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from perdure.contract import Change, CollectedUploads, Context, Exchange, Method, Server, Train
from perdure.core.trees import Tensors


@dataclass(frozen=True)
class Moments:
    """Server state: moving averages by parameter name."""

    first: Tensors = field(default_factory=dict)
    """m, of the updates."""
    second: Tensors = field(default_factory=dict)
    """v, of the squared updates."""


@dataclass(frozen=True)
class ServerOptimizer(Method):
    """FedAvg with an optimizer on the server; a subclass defines the moments and the step."""

    keep_moments: bool = False
    """Keep the moments at the end of a task. If false, every task starts without them."""

    ServerState: ClassVar[type] = Moments

    @abstractmethod
    def update_moments(self, old: Moments, update: Tensors) -> Moments:
        """Return the moments after an update."""

    @abstractmethod
    def step_direction(self, moments: Moments) -> Tensors:
        """Return the step per unit of `train.server_lr`."""

    def exchanges(self, context: Context) -> list[Exchange | Train]:
        """Train, with moments that begin anew unless they are kept."""
        train = Train(combine=self.combine, adjust=self.store_moments)
        return (
            [train]
            if self.keep_moments
            else [Exchange("reset", "none", aggregate=reset_moments), train]
        )

    def combine(self, server: Server, uploads: CollectedUploads, context: Context) -> Tensors:
        """Return the direction of the step."""
        return self.step_direction(self.update_moments(server.state, uploads.mean("update")))

    def store_moments(
        self, server: Server, change: Change, uploads: CollectedUploads, context: Context
    ) -> Change:
        """Keep the moments for the next round."""
        return replace(change, state=self.update_moments(server.state, uploads.mean("update")))


def reset_moments(server: Server, uploads: CollectedUploads, context: Context) -> Server:
    """Forget the moments."""
    return replace(server, state=Moments())


def moment_or_initial(moments: Tensors, name: str, like: Tensor, first: float = 0.0) -> Tensor:
    """Return the moment of a parameter, or its first value if it is new."""
    return moments[name] if name in moments else torch.full_like(like, first)
