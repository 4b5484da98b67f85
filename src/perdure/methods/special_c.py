"""SPECIAL-C: the anchor of SPECIAL on the clients."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from perdure.config.section import NonNegativeFloat, Search
from perdure.contract.context import Client, Context, Server
from perdure.contract.exchanges import Exchange, OncePerTask, Prepared, Train
from perdure.contract.method import Diagnosis, Method
from perdure.contract.needs import Needs, Preferences
from perdure.contract.transforms import Proximal
from perdure.core.trees import Tree
from perdure.methods.parts.previous_model import KEEP_PREVIOUS_MODEL, PreviousModel, distance

FELT = 0.01
"""Fraction of the way to the anchor, over all rounds of a task, below which it does nothing."""


@dataclass(frozen=True)
class SpecialC(Method):
    """SPECIAL's anchor on the clients: a proximal map after every local step.

    In task k > 1, with w^{k-1} the final model of the previous task (the anchor), a local step is
        w <- prox(w - eta_l g) = (w - eta_l g + eta_l lambda w^{k-1}) / (1 + eta_l lambda),
    the proximal map of eta_l * lambda/2 ||w - w^{k-1}||^2. The server averages as in FedAvg.
    Clients receive the anchor once per task; uploads are those of FedAvg. Outputs that a task adds
    are not anchored.

    What lambda does depends on eta_l and on the number S of local steps: in a round a client goes
        pull = 1 - (1 + eta_l lambda)^(-S), which is close to eta_l * S * lambda if that is small,
    of the way to the anchor (for SPECIAL, lambda / (1 + lambda) of the way). It is recorded as
    `pull`. A run warns once if all rounds of a task together would not go 1% of the way: then the
    anchor does nothing, and the result is FedAvg's.

    Server state, the anchor:
        params: float, by parameter name. Without the outputs that the current task added.
        buffers: float, by name. Running statistics.

    Differs from the paper: its scaling of the map is not known to us; this is the standard one.
    Clients are weighted as in FedAvg; the paper has the plain mean (`train.weighting: uniform`).

    Reference: Server-Proximal Aggregation for Federated Domain-Incremental Learning under Partial
    Participation (Algorithm 2, Appendix F.5).
    """

    lambda_: Annotated[NonNegativeFloat, Field(alias="lambda"), Search(0.01, 100, log=True)] = 0.1
    """Weight of the anchor (the paper's lambda). In a round a client goes about lr * steps * lambda
    of the way to it. 0 is FedAvg."""

    title: ClassVar[str] = "SPECIAL-C"
    family: ClassVar[str] = "Regularization and distillation"
    idea: ClassVar[str] = "Clients pull every step towards the model of the previous task."
    paper: ClassVar[str] = (
        "SPECIAL: Server-Proximal Aggregation for Federated Domain-Incremental Learning"
    )
    ServerState: ClassVar[type] = PreviousModel
    needs: ClassVar[Needs] = Needs(prefers=Preferences(head={"split": "growing"}))

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

    def diagnose(self, server: Server[PreviousModel], context: Context) -> Diagnosis:
        """Return the distance from the anchor, and the way to the anchor per round."""
        anchor = server.state.params
        if not anchor:
            return Diagnosis()
        numbers: Tree = {"drift": distance(server.params, anchor), "pull": self.pull(context)}
        return Diagnosis(numbers, self.warnings(context))

    def pull(self, context: Context) -> float:
        """Return the fraction of the way to the anchor that a client goes in a round."""
        return -math.expm1(-context.local_steps * math.log1p(context.lr * self.lambda_))

    def warnings(self, context: Context) -> dict[str, str]:
        """Warn of an anchor that goes less than 1% of the way in all rounds of a task."""
        if not (self.lambda_ and context.local_steps):
            return {}
        pull = self.pull(context)
        if 1 - (1 - pull) ** context.rounds >= FELT:
            return {}
        lr_sum = context.lr * context.local_steps
        return {
            "pull": (
                f"special-c: the anchor does next to nothing: with lambda {self.lambda_:g} a "
                f"client goes {pull:.1e} of the way to it per round (lr {context.lr:g} x "
                f"{context.local_steps:g} steps x lambda); lambda {0.1 / lr_sum:.2g} would go "
                "about a tenth of the way"
            )
        }
