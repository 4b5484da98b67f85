"""FedAvgM, and the base that it shares with FedAdam and FedYogi: an optimizer on the server.

The clients' mean update takes the place of a gradient. `combine` returns the direction of the step,
which the training loop multiplies by `train.server_lr`; `adjust` stores the moments. By default the
moments are reset at the start of each task, since those of the previous task point in a direction
that no longer reduces the loss.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from perdure.config.section import Search
from perdure.contract.context import Context, Server
from perdure.contract.exchanges import Exchange, Train
from perdure.contract.method import Method
from perdure.contract.needs import Needs, Preferences
from perdure.contract.uploads import Change, CollectedUploads
from perdure.core.trees import Tensors


@dataclass(frozen=True)
class Moments:
    """Server state: moving averages by parameter name."""

    first: Tensors = field(default_factory=dict)
    """m: of the updates."""
    second: Tensors = field(default_factory=dict)
    """v: of the squared updates."""


@dataclass(frozen=True)
class ServerOptimizer(Method):
    """Base class of methods with an optimizer on the server.

    A subclass defines how the moments change and the direction of the step.
    """

    keep_moments: bool = False
    """Keep the moments at the end of a task. If false, every task starts without them."""

    ServerState: ClassVar[type] = Moments
    needs: ClassVar[Needs] = Needs(prefers=Preferences(head={"split": "growing"}), cumulative=True)

    @abstractmethod
    def update_moments(self, old: Moments, update: Tensors) -> Moments:
        """Return the moments after an update."""

    @abstractmethod
    def step_direction(self, moments: Moments) -> Tensors:
        """Return the step per unit of `train.server_lr`."""

    def exchanges(self, context: Context) -> list[Exchange | Train]:
        """Reset the moments unless they are kept, then train."""
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
        """Store the moments for the next round."""
        return replace(change, state=self.update_moments(server.state, uploads.mean("update")))


def reset_moments(server: Server, uploads: CollectedUploads, context: Context) -> Server:
    """Reset the moments at the start of a task."""
    return replace(server, state=Moments())


def moment_or_initial(moments: Tensors, name: str, update: Tensor, initial: float = 0.0) -> Tensor:
    """Return the moment of a parameter; where it has none (new prompts too), its initial value."""
    if name in moments and moments[name].shape == update.shape:
        return moments[name]
    moment = torch.full_like(update, initial)
    if name in moments:
        moment[: len(moments[name])] = moments[name]
    return moment


@dataclass(frozen=True)
class FedAvgM(ServerOptimizer):
    """FedAvg with momentum on the server.

    With D the mean update of a round, beta = `momentum` and eta = `train.server_lr`:
        m <- beta m + D
        w <- w + eta m
    Uploads are those of FedAvg.

    Server state, by parameter name and of the parameter's shape:
        first: float. m.

    Differs from the paper: m is reset at the start of each task unless `keep_moments`.

    Reference: Hsu, Qi, Brown: Measuring the Effects of Non-Identical Data Distribution for
    Federated Visual Classification, 2019.
    """

    momentum: Annotated[float, Field(ge=0, lt=1), Search(0.5, 0.99)] = 0.9
    """Momentum of the server (the paper's beta); 0 is FedAvg."""

    title: ClassVar[str] = "FedAvgM"
    family: ClassVar[str] = "Server optimizers"
    idea: ClassVar[str] = "SGD with momentum on the server."
    paper: ClassVar[str] = "Hsu et al., 2019"

    def update_moments(self, old: Moments, update: Tensors) -> Moments:
        """Return m <- beta m + D."""
        first = {
            n: self.momentum * moment_or_initial(old.first, n, d) + d for n, d in update.items()
        }
        return Moments(first)

    def step_direction(self, moments: Moments) -> Tensors:
        """Return m."""
        return moments.first
