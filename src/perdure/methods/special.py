"""SPECIAL: FedAvg with an anchor on the server."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from perdure.config.section import NonNegativeFloat, PositiveFloat, Search
from perdure.contract.context import Context, Server
from perdure.contract.exchanges import Exchange, Train
from perdure.contract.method import Diagnosis, Method
from perdure.contract.needs import Needs, Preferences
from perdure.contract.uploads import Change, CollectedUploads
from perdure.core.trees import Tensors
from perdure.methods.parts.previous_model import (
    AnchorState,
    Missing,
    distance,
    previous_model,
    towards_anchor,
    weight_within_reach,
    with_missing,
)


@dataclass(frozen=True)
class Special(Method):
    """FedAvg with an anchor on the server: the final model of the previous task.

    In task k, round t, with w^{k-1} the final model of the previous task (Algorithm 1):
        What      = w^{k,t} + eta_g * mean_m Delta_m          (mean over sampled clients)
        w^{k,t+1} = argmin_w 1/2 ||w - What||^2 + lambda/2 ||w - w^{k-1}||^2         (eq. 5)
                  = (What + lambda w^{k-1}) / (1 + lambda)                            (eq. 6)
    and w^{1,t+1} = What in the first task. Hence the distance from the anchor shrinks by
    1 / (1 + lambda) in every round, so that for all t and all samples of clients (as in Lemma 4.9)
        ||w^{k,t} - w^{k-1}|| <= eta_g max_t ||mean Delta|| / lambda.
    Uploads and broadcasts are those of FedAvg.

    Server state:
        anchor: the final model of the previous task (params, buffers). Empty in the first task.
        weight: float or None. lambda of the last round with an anchor.
        last_update: float, by parameter name. Update of the last round, for `missing: carry`.
        initial: float, by parameter name. w^0, for `auto_lambda`, in the first task only.
        first_distance: float. ||w^1 - w^0||, for `auto_lambda`.

    With lambda 0 it is FedAvg, bit for bit, under the same settings.

    Differs from the paper: eta_g is constant and clients are weighted as in FedAvg, so that at the
    defaults the anchor is all in which the two differ. The paper has the plain mean
    (`train.weighting: uniform`) and an eta_g that decreases with the task's index, of which 1/k is
    our reading (`train.server_schedule: 1/k`). That step alone forgets less and learns less,
    without any anchor: compare methods with it or without it. Outputs that a task adds are not
    anchored. Options that are not in the paper:
    - `auto_lambda`: with D = ||What - w^{k-1}|| and the radius R = reach * ||w^1 - w^0||,
      lambda = D / R. The distance after the round is then D R / (D + R) < R for any update: small
      steps are almost free, large ones are restrained. It needs no data and no message.
    - `missing`: how a round treats sampled clients that did not upload. With a the fraction that
      did, `leave_out` applies the mean of the uploads, `damp` a * mean, and `carry`
      a * mean + (1 - a) * last, with the update of the last round. Each is a convex combination of
      0 and of means of earlier rounds of the task, so the bound above holds with the same
      right-hand side, also if an update arrives a round late. Without any upload the model does
      not change.
    - `statistics`: whether running statistics of batch norm are averaged, or blended with the
      anchor's like parameters.

    Reference: Server-Proximal Aggregation for Federated Domain-Incremental Learning under Partial
    Participation: Task-Uniform Convergence and Backward Transfer (SPECIAL: Server-Proximal
    Efficient Continual Aggregation for Learning).
    """

    lambda_: Annotated[NonNegativeFloat, Field(alias="lambda"), Search(0.01, 1, log=True)] = 0.1
    """Weight of the anchor (the paper's lambda): every round the server goes lambda / (1 + lambda)
    of the way to it. 0 is FedAvg."""
    auto_lambda: bool = False
    """Let the server choose lambda, so that the model stays within `reach` (not in the paper)."""
    reach: Annotated[PositiveFloat, Search(1, 16, log=True)] = 4.0
    """Radius around the anchor with `auto_lambda`, as a multiple of the distance that the first
    task moved the model."""
    missing: Missing = "leave_out"
    """What replaces the updates of clients that did not upload (not in the paper): nothing
    (leave_out), zeros (damp), or the last round's update (carry)."""
    statistics: Literal["average", "blend"] = "average"
    """Running statistics: averaged, or blended with the anchor's (not in the paper)."""

    title: ClassVar[str] = "SPECIAL"
    family: ClassVar[str] = "Regularization and distillation"
    idea: ClassVar[str] = "The server pulls the model towards that of the previous task."
    paper: ClassVar[str] = (
        "SPECIAL: Server-Proximal Aggregation for Federated Domain-Incremental Learning"
    )
    ServerState: ClassVar[type] = AnchorState
    needs: ClassVar[Needs] = Needs(prefers=Preferences(head={"split": "growing"}))

    def exchanges(self, context: Context) -> list[Exchange | Train]:
        """Set the anchor, then train as in FedAvg with an adjusted update."""
        opening = self.set_anchor if context.task else self.store_initial_model
        return [
            Exchange("anchor", participants="none", aggregate=opening),
            Train(adjust=self.adjust),
        ]

    def set_anchor(
        self, server: Server[AnchorState], uploads: CollectedUploads, context: Context
    ) -> Server[AnchorState]:
        """Set the model at the start of the task, w^{k-1}, as its anchor."""
        old = server.state
        moved = distance(server.params, old.initial) if old.initial else old.first_distance
        anchor = previous_model(server, context)
        return replace(server, state=AnchorState(anchor, old.weight, first_distance=moved))

    def store_initial_model(
        self, server: Server[AnchorState], uploads: CollectedUploads, context: Context
    ) -> Server[AnchorState]:
        """Keep w^0, which `auto_lambda` alone needs."""
        state = AnchorState(initial=server.params) if self.auto_lambda else server.state
        return replace(server, state=state)

    def adjust(
        self, server: Server, change: Change, uploads: CollectedUploads, context: Context
    ) -> Change:
        """Return What in the first task; then the model on the way to the anchor (eq. 6)."""
        state: AnchorState = server.state
        arrived, last = uploads.upload_fraction, state.last_update
        step = with_missing(change.params, self.missing, arrived, last)  # What - w^{k,t}
        if self.missing == "carry":
            state = replace(state, last_update=step)
        if not state.anchor.params:
            return Change(step, change.buffers, state)
        weight = weight_within_reach(server, step, self.reach) if self.auto_lambda else self.lambda_
        pulled = towards_anchor(step, server.params, state.anchor.params, weight)  # eq. 6
        buffers = self.pull_statistics(change.buffers, server)
        return Change(pulled, buffers, replace(state, weight=weight))

    def pull_statistics(self, step: Tensors, server: Server[AnchorState]) -> Tensors:
        """Return the change of running statistics; blended ones with the last round's weight."""
        if self.statistics == "average":
            return step
        first = 0.0 if self.auto_lambda else self.lambda_
        weight = first if server.state.weight is None else server.state.weight
        return towards_anchor(step, server.buffers, server.state.anchor.buffers, weight)

    def diagnose(self, server: Server[AnchorState], context: Context) -> Diagnosis:
        """Return the distance from the anchor, lambda, and the way to the anchor per round."""
        state = server.state
        if not state.anchor.params:
            return Diagnosis()
        weight = self.lambda_ if state.weight is None else state.weight
        drift = distance(server.params, state.anchor.params)
        return Diagnosis({"drift": drift, "lambda": weight, "pull": weight / (1 + weight)})
