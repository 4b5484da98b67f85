"""FedProx: FedAvg with a proximal term on the clients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from perdure.config.section import NonNegativeFloat, Search
from perdure.contract.context import Client, Context
from perdure.contract.exchanges import Exchange, Prepared, Train
from perdure.contract.method import Method
from perdure.contract.needs import Needs, Preferences
from perdure.contract.transforms import Proximal


@dataclass(frozen=True)
class FedProx(Method):
    """FedAvg whose clients stay close to the model that they received.

    Client k minimizes f_k(w) + (mu / 2) ||w - w_received||^2. Uploads are those of FedAvg.

    Reference: Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: Federated Optimization in Heterogeneous
    Networks, MLSys 2020.
    """

    mu: Annotated[NonNegativeFloat, Search(1e-3, 1, log=True)] = 0.01
    """Weight of the proximal term (the paper's mu); 0 is FedAvg."""

    title: ClassVar[str] = "FedProx"
    family: ClassVar[str] = "Baselines"
    idea: ClassVar[str] = "A proximal term holds every client near the model that it received."
    paper: ClassVar[str] = "Li et al., MLSys 2020"
    needs: ClassVar[Needs] = Needs(prefers=Preferences(head={"split": "growing"}), cumulative=True)

    def exchanges(self, context: Context) -> list[Exchange | Train]:
        """Train with a proximal term."""
        return [Train(prepare=self.add_proximal_term)]

    def add_proximal_term(self, client: Client) -> Prepared:
        """Return the proximal term, whose gradient is mu (w - w_received)."""
        return Prepared(transforms=(Proximal(client.params, self.mu),))
