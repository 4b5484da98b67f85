"""FedYogi: FedAvg with Yogi on the server."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from perdure.methods.fedadam import FedAdam


@dataclass(frozen=True)
class FedYogi(FedAdam):
    """FedAvg with Yogi on the server, whose second moment changes in small steps.

    As FedAdam, but with D the mean update of a round:
        v <- v - (1 - beta_2) D^2 sign(v - D^2)

    Reference: Reddi, Charles, Zaheer, Garrett, Rush, Konecny, Kumar, McMahan: Adaptive Federated
    Optimization, ICLR 2021 (Algorithm 2).
    """

    def update_second(self, old: Tensor, square: Tensor) -> Tensor:
        """Return v <- v - (1 - beta_2) D^2 sign(v - D^2)."""
        return old - (1 - self.beta2) * square * (old - square).sign()
