"""SPECIAL-C: the anchor of SPECIAL on the clients, as a proximal map after every local step.

The client-side variant (Algorithm 2, Appendix F.5) of: Server-Proximal Aggregation for Federated
Domain-Incremental Learning under Partial Participation. In task k > 1 a client's step is
    w <- prox(w - eta_l g) = (w - eta_l g + eta_l lambda w^{k-1}) / (1 + eta_l lambda),
the proximal map of eta_l * lambda/2 ||w - w^{k-1}||^2; the server takes the plain average. The
paper's scaling of the map is lost; this is the standard one. Clients get w^{k-1} once per task.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from perdure.config.types import NonNegativeFloat
from perdure.contract import (
    Client,
    Context,
    Exchange,
    Method,
    Needs,
    OncePerTask,
    Prepared,
    Proximal,
    Server,
    Train,
)
from perdure.core.trees import Tree
from perdure.methods.parts.previous_model import (
    KEEP_PREVIOUS_MODEL,
    PreviousModel,
    difference,
    total_norm,
)


@dataclass(frozen=True)
class SpecialC(Method):
    """The client-side anchor."""

    lambda_: Annotated[NonNegativeFloat, Field(alias="lambda")] = 0.1
    """Weight of the anchor (the paper's lambda); 0 is FedAvg."""

    paper: ClassVar[str] = (
        "SPECIAL: Server-Proximal Aggregation for Federated Domain-Incremental Learning"
    )
    ServerState: ClassVar[type] = PreviousModel

    @property
    def needs(self) -> Needs:
        """Weight clients equally: the paper's average is (1/N) sum over the sampled clients."""
        return Needs(weighting="uniform")

    def exchanges(self, context: Context) -> list[Exchange | Train]:
        """Keep w^{k-1} as the anchor, and train with its proximal map."""
        if context.task == 0:
            return [Train()]
        return [KEEP_PREVIOUS_MODEL, Train(broadcast=self.send_anchor, prepare=self.hold)]

    def send_anchor(
        self, server: Server[PreviousModel], context: Context
    ) -> dict[str, OncePerTask]:
        """Send the anchor once per task."""
        return {"anchor": OncePerTask(server.state.params)}

    def hold(self, client: Client) -> Prepared:
        """Return the proximal map; outputs that came with the task have no past and are free."""
        return Prepared(
            transforms=(Proximal(client.broadcast["anchor"], self.lambda_, implicit=True),)
        )

    def diagnostics(self, server: Server[PreviousModel], context: Context) -> Tree:
        """Return how far the model is from its anchor."""
        anchor = server.state.params
        return {"drift": total_norm(difference(server.params, anchor))} if anchor else {}
