"""SPECIAL-C: the anchor of SPECIAL on the clients, as a proximal map after every local step.

The client-side variant (Algorithm 2, Appendix F.5) of: Server-Proximal Aggregation for Federated
Domain-Incremental Learning under Partial Participation. In task k > 1 a client's step is
    w <- prox(w - eta_l g) = (w - eta_l g + eta_l lambda w^{k-1}) / (1 + eta_l lambda),
the proximal map of eta_l * lambda/2 ||w - w^{k-1}||^2; the server takes the plain average. The
paper's scaling of the map is lost; this is the standard one. Clients get w^{k-1} once a task.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

from pydantic import Field

from perdure.methods.base import Method, Place, Server
from perdure.methods.special import differences, norm, past
from perdure.trees import Tensors, Tree


@dataclass(frozen=True)
class SpecialC(Method):
    """The client-side anchor.

    lambda: weight of the anchor (the paper's lambda); 0 is FedAvg.
    """

    lambda_: Annotated[float, Field(alias="lambda", ge=0)] = 0.1

    paper: ClassVar[str] = (
        "SPECIAL: Server-Proximal Aggregation for Federated Domain-Incremental Learning"
    )

    def preferred_weighting(self) -> str:
        """The paper's average is (1/N) sum over the sampled clients."""
        return "uniform"

    def begin_task(self, server: Server, place: Place) -> Server:
        """The model as it is now, w^{k-1}, becomes the anchor."""
        if place.task == 0:
            return server
        return replace(server, memory={"anchor": past(server.params, place.task)})

    def broadcast_lasting(self, server: Server, place: Place) -> Tree:
        """The anchor, once a task."""
        return dict(server.memory)

    def settle(
        self, params: Tensors, before: Tensors, received: Tree, own: Tensors, lr: float
    ) -> Tensors:
        """The proximal map; outputs that came with the task have no past and stay as they are."""
        anchor, weight = received.get("anchor", {}), lr * self.lambda_
        return {
            name: (value + weight * anchor[name]) / (1 + weight) if name in anchor else value
            for name, value in params.items()
        }

    def diagnose(self, server: Server, place: Place) -> Tree:
        """How far the model is from its anchor."""
        anchor = server.memory.get("anchor")
        return {} if anchor is None else {"drift": norm(differences(server.params, anchor))}

    def export(self, server: Server) -> Tree:
        """Prediction needs the model alone."""
        return {}
