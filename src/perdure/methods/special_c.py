"""SPECIAL-C: the anchor of SPECIAL on the clients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from perdure.config.types import NonNegativeFloat
from perdure.contract.context import Client, Context, Server
from perdure.contract.exchanges import Exchange, OncePerTask, Prepared, Train
from perdure.contract.method import Method
from perdure.contract.needs import Needs
from perdure.contract.transforms import Proximal
from perdure.core.trees import Tree
from perdure.methods.parts.previous_model import (
    KEEP_PREVIOUS_MODEL,
    PreviousModel,
    distance,
)


@dataclass(frozen=True)
class SpecialC(Method):
    """SPECIAL's anchor on the clients: a proximal map after every local step.

    In task k > 1, with w^{k-1} the final model of the previous task (the anchor), a local step is
        w <- prox(w - eta_l g) = (w - eta_l g + eta_l lambda w^{k-1}) / (1 + eta_l lambda),
    the proximal map of eta_l * lambda/2 ||w - w^{k-1}||^2. The server takes the plain mean. Clients
    receive the anchor once per task; uploads are those of FedAvg. Outputs that a task adds are not
    anchored.

    Server state, the anchor:
        params: float, by parameter name. Without the outputs that the current task added.
        buffers: float, by name. Running statistics.

    Differs from the paper: its scaling of the map is not known to us; this is the standard one.

    Reference: Server-Proximal Aggregation for Federated Domain-Incremental Learning under Partial
    Participation (Algorithm 2, Appendix F.5).
    """

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
        """Store w^{k-1} as the anchor, then train with its proximal map."""
        if context.task == 0:
            return [Train()]
        return [
            KEEP_PREVIOUS_MODEL,
            Train(broadcast=self.send_anchor, prepare=self.pull_towards_anchor),
        ]

    def send_anchor(
        self, server: Server[PreviousModel], context: Context
    ) -> dict[str, OncePerTask]:
        """Send the anchor once per task."""
        return {"anchor": OncePerTask(server.state.params)}

    def pull_towards_anchor(self, client: Client) -> Prepared:
        """Return the proximal map; outputs that the task added are not anchored."""
        return Prepared(
            transforms=(Proximal(client.broadcast["anchor"], self.lambda_, implicit=True),)
        )

    def diagnostics(self, server: Server[PreviousModel], context: Context) -> Tree:
        """Return the distance of the model from its anchor."""
        anchor = server.state.params
        return {"drift": distance(server.params, anchor)} if anchor else {}
