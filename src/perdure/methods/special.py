"""SPECIAL: FedAvg with an anchor on the server, the final model of the task before.

Server-Proximal Aggregation for Federated Domain-Incremental Learning under Partial Participation:
Task-Uniform Convergence and Backward Transfer (SPECIAL: Server-Proximal Efficient Continual
Aggregation for Learning).

The paper's, Algorithm 1, task k, round t, w^{k-1} the final model of the task before:
    What      = w^{k,t} + eta_g * mean_m Delta_m      (plain mean, N clients without replacement)
    w^{k,t+1} = argmin_w 1/2 ||w - What||^2 + lambda/2 ||w - w^{k-1}||^2         (eq. 5)
              = (What + lambda w^{k-1}) / (1 + lambda)                            (eq. 6)
and w^{1,t+1} = What in the first task. The text says that eta_g falls with the task's index; that
it is 1/k is our reading (train.server_lr and train.server_schedule change it). What follows (Lemma
4.9 has this shape): the distance from the anchor shrinks by 1 / (1 + lambda) in every round, so
that for all t and all samples of clients
    ||w^{k,t} - w^{k-1}|| <= eta_g max_t ||mean Delta|| / lambda.

Ours, as named options:
- `auto_lambda`: lambda from the drift that the server sees. With D = ||What - w^{k-1}|| and
  a radius R = reach * ||w^1 - w^0|| (how far the first task moved the model), lambda = D / R. The
  drift after the round is D R / (D + R) < R whatever the clients send: small steps pass almost
  freely, large ones are held back. It needs no data and no message.
- `missing`: what a round does for sampled clients that did not report. With a the share that did:
  "leave_out" takes the mean of the reports; "damp" counts the missing as not having moved
  (a * mean); "carry" lets the last round's direction stand in for them
  (a * mean + (1 - a) * last). Each is a convex combination of 0 and of means of earlier rounds of
  the task, so the bound above holds with the same right-hand side. The bound asks nothing of the
  model from which a client started, so an update that comes a round late does not break it either.
  A round in which nobody reports leaves the model where it is, inside the bound.
- `statistics`: whether running statistics of batch norm are averaged or blended like parameters.
- Outputs that arrive with a task (a growing head) have no past and are not anchored.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from perdure.config.types import NonNegativeFloat, PositiveFloat
from perdure.contract import (
    Change,
    CollectedUploads,
    Context,
    Exchange,
    Method,
    Needs,
    Server,
    Train,
)
from perdure.core.trees import Tensors, Tree, scaled
from perdure.methods.parts.previous_model import (
    PreviousModel,
    difference,
    previous_model,
    total_norm,
)

_TINY = 1e-12
"""A first task that moved the model less than this moved it not at all: it stays at its anchor."""


@dataclass(frozen=True)
class AnchorState:
    """What the server keeps."""

    anchor: PreviousModel = field(default_factory=PreviousModel)
    """w^{k-1}; empty in the first task."""
    weight: float | None = None
    """lambda of the last round; None before the first round with an anchor."""
    last_update: Tensors = field(default_factory=dict)
    """`missing: carry`: the update of the last round of this task."""
    initial: Tensors = field(default_factory=dict)
    """`auto_lambda`: w^0, in the first task only."""
    first_distance: float = 0.0
    """`auto_lambda`: ||w^1 - w^0||, after the first task."""


@dataclass(frozen=True)
class Special(Method):
    """The server anchor."""

    lambda_: Annotated[NonNegativeFloat, Field(alias="lambda")] = 0.1
    """Weight of the anchor (the paper's lambda); 0 is FedAvg."""
    auto_lambda: bool = False
    """Let the server choose lambda, so that the model stays within `reach` (not in the paper)."""
    reach: PositiveFloat = 4.0
    """Radius around the anchor with `auto_lambda`, as a multiple of the distance that the first
    task moved the model."""
    missing: Literal["leave_out", "damp", "carry"] = "leave_out"
    """What replaces the updates of clients that did not upload (not in the paper): nothing
    (leave_out), zeros (damp), or the last round's update (carry)."""
    statistics: Literal["average", "blend"] = "average"
    """Running statistics: averaged, or blended with the anchor's (not in the paper)."""

    paper: ClassVar[str] = (
        "SPECIAL: Server-Proximal Aggregation for Federated Domain-Incremental Learning"
    )
    ServerState: ClassVar[type] = AnchorState

    @property
    def needs(self) -> Needs:
        """Weight clients equally, as in the paper's (1/N) sum, with eta_g = 1/k."""
        return Needs(weighting="uniform", server_schedule="1/k")

    def exchanges(self, context: Context) -> list[Exchange | Train]:
        """Take the anchor, then train as in FedAvg with an adjusted update."""
        take = self.take_anchor if context.task else self.take_initial
        return [Exchange("anchor", participants="none", aggregate=take), Train(adjust=self.adjust)]

    def take_initial(
        self, server: Server[AnchorState], uploads: CollectedUploads, context: Context
    ) -> Server[AnchorState]:
        """Keep w^0, which `auto_lambda` alone needs."""
        return (
            replace(server, state=AnchorState(initial=server.params))
            if self.auto_lambda
            else server
        )

    def take_anchor(
        self, server: Server[AnchorState], uploads: CollectedUploads, context: Context
    ) -> Server[AnchorState]:
        """Make the model with which the task begins, w^{k-1}, its anchor."""
        state = server.state
        moved = state.first_distance
        if state.initial:
            moved = total_norm(difference(server.params, state.initial))
        anchor = previous_model(server, context)
        return replace(server, state=AnchorState(anchor, state.weight, first_distance=moved))

    def adjust(
        self,
        server: Server[AnchorState],
        change: Change[AnchorState],
        uploads: CollectedUploads,
        context: Context,
    ) -> Change[AnchorState]:
        """Take the step to What, and from there towards the anchor (eq. 6)."""
        state, anchor = server.state, server.state.anchor.params
        step = self.with_missing(change.params, state, uploads.upload_fraction)
        if self.missing == "carry":
            state = replace(state, last_update=step)
        if not anchor:  # the first task: w^{1,t+1} = What
            return Change(step, change.buffers, state)
        weight = self.anchor_weight(step, server)
        step = step | towards_anchor(step, server.params, anchor, weight)
        return Change(step, self.buffers_step(change, server), replace(state, weight=weight))

    def with_missing(self, update: Tensors, state: AnchorState, fraction: float) -> Tensors:
        """Return the clients' direction if only a fraction of the sampled ones reported."""
        if self.missing == "leave_out":
            return update
        damped = scaled(update, fraction)
        last = state.last_update if self.missing == "carry" else {}
        carried = {n: damped[n].add(last[n], alpha=1 - fraction) for n in damped if n in last}
        return damped | carried

    def anchor_weight(self, step: Tensors, server: Server[AnchorState]) -> float:
        """Return lambda of this round: the option, or D / R."""
        if not self.auto_lambda:
            return self.lambda_
        anchor = server.state.anchor.params
        ahead = {name: server.params[name] + step[name] for name in step if name in anchor}
        radius = self.reach * server.state.first_distance
        return total_norm(difference(ahead, anchor)) / max(radius, _TINY)

    def buffers_step(self, change: Change[AnchorState], server: Server[AnchorState]) -> Tensors:
        """Return the change of running statistics; blended ones with the last round's weight."""
        if self.statistics == "average":
            return change.buffers
        first = 0.0 if self.auto_lambda else self.lambda_
        weight = first if server.state.weight is None else server.state.weight
        anchor = server.state.anchor.buffers
        return change.buffers | towards_anchor(change.buffers, server.buffers, anchor, weight)

    def diagnostics(self, server: Server[AnchorState], context: Context) -> Tree:
        """Return how far the model is from its anchor, and the weight that holds it."""
        state = server.state
        if not state.anchor.params:
            return {}
        weight = self.lambda_ if state.weight is None else state.weight
        return {
            "drift": total_norm(difference(server.params, state.anchor.params)),
            "lambda": weight,
        }


def towards_anchor(step: Tensors, start: Tensors, anchor: Tensors, weight: float) -> Tensors:
    """Return the change from `start` to (start + step + weight * anchor) / (1 + weight)."""
    names = [name for name in step if name in anchor]
    return {
        name: (step[name] + weight * (anchor[name] - start[name])) / (1 + weight) for name in names
    }
