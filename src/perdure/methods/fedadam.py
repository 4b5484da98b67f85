"""FedAdam: FedAvg with Adam on the server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor

from perdure.config.section import Fixed, Search
from perdure.contract.needs import Needs, Preferences
from perdure.core.trees import Tensors
from perdure.methods.fedavgm import Moments, ServerOptimizer, moment_or_initial


@dataclass(frozen=True)
class FedAdam(ServerOptimizer):
    """FedAvg with Adam on the server.

    With D the mean update of a round, v_0 = tau^2 and eta = `train.server_lr`:
        m <- beta_1 m + (1 - beta_1) D
        v <- beta_2 v + (1 - beta_2) D^2
        w <- w + eta m / (sqrt(v) + tau)
    There is no bias correction, as in the paper. Uploads are those of FedAvg.

    Server state, by parameter name and of the parameter's shape:
        first: float. m.
        second: float. v.

    Differs from the paper: the moments are reset at the start of each task unless `keep_moments`.

    Reference: Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan: Adaptive Federated
    Optimization, ICLR 2021 (Algorithm 2).
    """

    beta1: Annotated[float, Field(ge=0, lt=1), Fixed()] = 0.9
    """Decay of the first moment (the paper's beta_1)."""
    beta2: Annotated[float, Field(ge=0, lt=1), Fixed()] = 0.99
    """Decay of the second moment (the paper's beta_2)."""
    tau: Annotated[float, Field(gt=0), Search(1e-5, 1e-1, log=True)] = 1e-3
    """Degree of adaptivity: with a larger tau, steps resemble those of FedAvgM more."""

    title: ClassVar[str] = "FedAdam"
    family: ClassVar[str] = "Server optimizers"
    idea: ClassVar[str] = "Adam on the server, without bias correction."
    paper: ClassVar[str] = "Reddi et al., ICLR 2021"
    needs: ClassVar[Needs] = Needs(
        # a small step, since every entry of the model moves by about eta
        prefers=Preferences(head={"split": "growing"}, server_lr=0.03),
        cumulative=True,
    )

    def update_moments(self, old: Moments, update: Tensors) -> Moments:
        """Return m and v after D."""
        second = {n: moment_or_initial(old.second, n, d, self.tau**2) for n, d in update.items()}
        return Moments(
            {
                n: self.update_first(moment_or_initial(old.first, n, d), d)
                for n, d in update.items()
            },
            {n: self.update_second(second[n], d.square()) for n, d in update.items()},
        )

    def update_first(self, old: Tensor, update: Tensor) -> Tensor:
        """Return m <- beta_1 m + (1 - beta_1) D."""
        return self.beta1 * old + (1 - self.beta1) * update

    def update_second(self, old: Tensor, square: Tensor) -> Tensor:
        """Return v <- beta_2 v + (1 - beta_2) D^2."""
        return self.beta2 * old + (1 - self.beta2) * square

    def step_direction(self, moments: Moments) -> Tensors:
        """Return m / (sqrt(v) + tau)."""
        return {n: m / (moments.second[n].sqrt() + self.tau) for n, m in moments.first.items()}
