"""FedAvgM: FedAvg with momentum on the server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from perdure.config.section import Search
from perdure.core.trees import Tensors
from perdure.methods.parts.server_optimizer import Moments, ServerOptimizer, moment_or_initial


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
