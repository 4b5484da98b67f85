"""FedYogi: FedAvg with Yogi on the server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from perdure.methods.fedadam import FedAdam


@dataclass(frozen=True)
class FedYogi(FedAdam):
    """FedAvg with Yogi on the server, whose second moment changes in small steps.

    As FedAdam, but with D the mean update of a round:
        v <- v - (1 - beta_2) D^2 sign(v - D^2)

    Reference: Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan: Adaptive Federated
    Optimization, ICLR 2021 (Algorithm 2).
    """

    title: ClassVar[str] = "FedYogi"
    family: ClassVar[str] = "Server optimizers"
    idea: ClassVar[str] = "Yogi on the server: the second moment changes by small steps."

    def update_second(self, old: Tensor, square: Tensor) -> Tensor:
        """Return v <- v - (1 - beta_2) D^2 sign(v - D^2)."""
        return old - (1 - self.beta2) * square * (old - square).sign()
