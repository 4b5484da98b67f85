"""SPECIAL: FedAvg with an anchor on the server, the final model of the task before.

Server-Proximal Aggregation for Federated Domain-Incremental Learning under Partial Participation:
Task-Uniform Convergence and Backward Transfer (SPECIAL: Server-Proximal Efficient Continual
Aggregation for Learning).

The paper's, Algorithm 1, task k, round t, w^{k-1} the final model of the task before:
    What      = w^{k,t} + eta_g * mean_m Delta_m      (plain mean, N clients without replacement)
    w^{k,t+1} = argmin_w 1/2 ||w - What||^2 + lambda/2 ||w - w^{k-1}||^2         (eq. 5)
              = (What + lambda w^{k-1}) / (1 + lambda)                            (eq. 6)
and w^{1,t+1} = What in the first task. The text says that eta_g falls with the task's index; that
it is 1/k is our reading. What follows (Lemma 4.9 has this shape): the distance from the anchor
shrinks by 1 / (1 + lambda) in every round, so that for all t, whoever was sampled,
    ||w^{k,t} - w^{k-1}|| <= eta_g max_t ||mean Delta|| / lambda.

Ours, as named options:
- `tune`: lambda from the drift that the server sees. With D = ||What - w^{k-1}|| and a radius
  R = reach * ||w^1 - w^0|| (how far the first task moved the model), lambda = D / R. Then the drift
  after the round is D R / (D + R) < R whatever the clients send: small steps pass almost freely,
  large ones are held back. It needs no data and no message.
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

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from perdure.methods.base import Method, Place, Server
from perdure.trees import Tensors, Tree

_TINY = 1e-12
"""Below this a way of the first task counts as none: the model then stays at its anchor."""
Schedule = Literal["1/k", "1/sqrt(k)", "constant"]


@dataclass(frozen=True)
class Special(Method):
    """The server anchor.

    lambda: weight of the anchor (the paper's lambda); 0 is FedAvg.
    global_lr, schedule: eta_g = global_lr, times 1/k, 1/sqrt(k) or 1 in task k = 1, 2, ...
    tune, reach: lambda by the server itself, within `reach` times the first task's way (ours).
    missing: what stands in for clients that did not report (ours).
    statistics: running statistics are averaged, or blended with the anchor's (ours).
    """

    lambda_: Annotated[float, Field(alias="lambda", ge=0)] = 0.1
    global_lr: Annotated[float, Field(gt=0)] = 1.0
    schedule: Schedule = "1/k"
    tune: bool = False
    reach: Annotated[float, Field(gt=0)] = 4.0
    missing: Literal["leave_out", "damp", "carry"] = "leave_out"
    statistics: Literal["average", "blend"] = "average"

    paper: ClassVar[str] = (
        "SPECIAL: Server-Proximal Aggregation for Federated Domain-Incremental Learning"
    )

    def preferred_weighting(self) -> str:
        """The paper's average is (1/N) sum over the sampled clients."""
        return "uniform"

    def start(self, params: Tensors, place: Place) -> Tree:
        """Only `tune` looks back at the initial model, to know the first task's way."""
        return {"initial": params} if self.tune else {}

    def begin_task(self, server: Server, place: Place) -> Server:
        """The model as it is now, w^{k-1}, becomes the anchor."""
        if place.task == 0:
            return server
        memory = {k: v for k, v in server.memory.items() if k not in ("initial", "last")}
        if "initial" in server.memory:
            memory["way"] = norm(differences(server.params, server.memory["initial"]))
        memory["anchor"] = past(server.params, place.task)
        if self.statistics == "blend":
            memory["anchor_buffers"] = server.buffers
        return replace(server, memory=memory)

    def adjust(self, update: Tensors, server: Server, place: Place) -> tuple[Tensors, Tree]:
        """The step to What, and from there towards the anchor (eq. 6)."""
        update, memory = self._present(update, server.memory, place)
        update = scaled(update, self.global_lr * rate(self.schedule, place.task + 1))
        anchor = server.memory.get("anchor")
        if anchor is None:
            return update, memory
        weight = self._weight(update, server.params, server.memory)
        return update | pulled(update, server.params, anchor, weight), memory | {"lambda": weight}

    def adjust_buffers(self, change: Tensors, server: Server, place: Place) -> Tensors:
        """Averaged; or blended with those of the task before, with the last round's weight."""
        anchor = server.memory.get("anchor_buffers")
        if anchor is None:
            return change
        weight = server.memory.get("lambda", 0.0 if self.tune else self.lambda_)
        return change | pulled(change, server.buffers, anchor, weight)

    def diagnose(self, server: Server, place: Place) -> Tree:
        """How far the model is from its anchor, and the weight that holds it."""
        anchor = server.memory.get("anchor")
        if anchor is None:
            return {}
        drift = norm(differences(server.params, anchor))
        return {"drift": drift, "lambda": server.memory.get("lambda", self.lambda_)}

    def export(self, server: Server) -> Tree:
        """Prediction needs the model alone."""
        return {}

    def _present(self, update: Tensors, memory: Tree, place: Place) -> tuple[Tensors, Tree]:
        """The clients' direction when only a share of the sampled ones reported."""
        if self.missing == "leave_out":
            return update, memory
        update = scaled(update, place.attendance)
        if self.missing == "damp":
            return update, memory
        last = memory.get("last", {})
        update = {
            name: value.add(last[name], alpha=1 - place.attendance) if name in last else value
            for name, value in update.items()
        }
        return update, memory | {"last": update}

    def _weight(self, update: Tensors, params: Tensors, memory: Tree) -> float:
        """The anchor's weight in this round."""
        if not self.tune:
            return self.lambda_
        anchor, radius = memory["anchor"], self.reach * float(memory["way"])
        ahead = {name: params[name] + update[name] for name in update if name in anchor}
        distance = norm(differences(ahead, anchor))
        return distance / max(radius, _TINY)


def rate(schedule: Schedule, k: int) -> float:
    """The factor on the global learning rate in task k = 1, 2, ..."""
    return {"1/k": 1 / k, "1/sqrt(k)": 1 / math.sqrt(k), "constant": 1.0}[schedule]


def pulled(update: Tensors, start: Tensors, anchor: Tensors, weight: float) -> Tensors:
    """The change from `start` to (start + update + weight * anchor) / (1 + weight)."""
    names = [name for name in update if name in anchor]
    return {
        name: (update[name] + weight * (anchor[name] - start[name])) / (1 + weight)
        for name in names
    }


def past(params: Tensors, task: int) -> Tensors:
    """The parameters that were there before a task: all but the outputs that came with it."""
    return {name: value for name, value in params.items() if not name.startswith(f"head.{task}.")}


def scaled(values: Tensors, factor: float) -> Tensors:
    """All values times a factor; the same tensors where it is 1."""
    return values if factor == 1 else {name: value * factor for name, value in values.items()}


def differences(a: Tensors, b: Tensors) -> Iterable[Tensor]:
    """A - b over the names that both have."""
    return (value - b[name] for name, value in a.items() if name in b)


def norm(values: Iterable[Tensor]) -> float:
    """The Euclidean norm of all values together."""
    parts = [torch.linalg.vector_norm(value) for value in values]
    return float(torch.linalg.vector_norm(torch.stack(parts))) if parts else 0.0
