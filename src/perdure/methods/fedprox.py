"""FedProx: FedAvg whose clients are held near the model that they received.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: Federated Optimization in Heterogeneous Networks,
MLSys 2020. Client k minimises f_k(w) + (mu / 2) ||w - w_received||^2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from perdure.methods.base import Method
from perdure.numbers import NotNegative
from perdure.trees import Tensors, Tree


@dataclass(frozen=True)
class FedProx(Method):
    """A proximal term on every client.

    mu: weight of the proximal term (the paper's mu); 0 is FedAvg.
    """

    mu: NotNegative = 0.01

    paper: ClassVar[str] = "Li et al., MLSys 2020"

    def gradient(self, grads: Tensors, params: Tensors, received: Tree, own: Tensors) -> Tensors:
        """The gradient of the proximal term is mu (w - w_received)."""
        start = received["params"]
        return {name: g + self.mu * (params[name] - start[name]) for name, g in grads.items()}
