"""The final model of the previous task: as a teacher (LwF, FLwF-2T), or as an anchor (SPECIAL)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from perdure.contract.context import Client, Context, Server
from perdure.contract.exchanges import Exchange, OncePerTask
from perdure.contract.needs import Needs, Preferences
from perdure.contract.step import Step
from perdure.contract.uploads import CollectedUploads
from perdure.core.trees import Tensors, scaled

# ---- The final global model of the previous task, used as an anchor or a teacher in the next task.


@dataclass(frozen=True)
class PreviousModel:
    """Server state: the global model w^{k-1} at the start of task k."""

    params: Tensors = field(default_factory=dict)
    """By name, without the outputs that task k added; empty in the first task."""
    buffers: Tensors = field(default_factory=dict)
    """Running statistics of batch norm by name."""


def previous_model(server: Server, context: Context) -> PreviousModel:
    """Return the model at the start of a task."""
    return PreviousModel(without_task_head(server.params, context.task), server.buffers)


def _keep(server: Server, uploads: CollectedUploads, context: Context) -> Server[PreviousModel]:
    return replace(server, state=previous_model(server, context))


KEEP_PREVIOUS_MODEL = Exchange("previous model", participants="none", aggregate=_keep)
"""Opening exchange that stores the model as the server state; for tasks after the first."""


def without_task_head(params: Tensors, task: int) -> Tensors:
    """Return the parameters that existed before a task: all but the outputs that it added."""
    return {name: value for name, value in params.items() if not name.startswith(f"head.{task}.")}


def distance(a: Tensors, b: Tensors) -> float:
    """Return the Euclidean norm of a - b over the names that both have."""
    return total_norm({name: value - b[name] for name, value in a.items() if name in b})


def total_norm(values: Tensors) -> float:
    """Return the Euclidean norm of all values together."""
    norms = [torch.linalg.vector_norm(value) for value in values.values()]
    return float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0


# ---- Distillation from it. The server state is a `PreviousModel`, which clients receive once
# per task

NEEDS_OF_DISTILLATION = Needs(
    classes=True,
    prefers=Preferences(
        head={"split": "growing"},
        active_outputs="task",
        demanded={"active_outputs": "its cross-entropy is over the new task's outputs"},
    ),
)
"""The needs of methods whose cross-entropy is over the outputs of the new task alone."""


def send_teacher(server: Server[PreviousModel], context: Context) -> dict[str, OncePerTask]:
    """Send the teacher and, if there are any, its running statistics, once per task."""
    teacher = server.state
    fields = {"teacher": OncePerTask(teacher.params)}
    if teacher.buffers:
        fields["teacher_buffers"] = OncePerTask(teacher.buffers)
    return fields


def old_outputs(client: Client) -> Tensors:
    """Return {"old_outputs": bool [outputs]}, the outputs of earlier tasks, for `teacher_loss`."""
    context = client.context
    mask = context.network.outputs.seen_mask(context.task - 1)
    return {"old_outputs": mask.to(client.data.index.device)}


def teacher_loss(step: Step, temperature: float) -> Tensor:
    """Return the distillation loss of every row from the teacher, over the old outputs."""
    broadcast = step.broadcast
    teacher_logits = step.logits_of(broadcast["teacher"], broadcast.get("teacher_buffers", {}))
    return distillation_loss(
        step.logits(), teacher_logits, step.tensors["old_outputs"], temperature
    )


def distillation_loss(
    logits: Tensor, teacher_logits: Tensor, outputs: Tensor, temperature: float
) -> Tensor:
    """Return the cross-entropy of a model's softened probabilities from a teacher's.

    Args:
        logits: float [rows, outputs]. Logits of the trained model.
        teacher_logits: float [rows, old outputs]. Logits of the teacher, which may lack the newest
            outputs; those it has come first.
        outputs: bool [outputs]. The outputs over which both softmaxes are taken.
        temperature: Divides all logits.

    Returns:
        float [rows].

    """
    count = teacher_logits.shape[1]
    outputs = outputs[:count]
    target = teacher_logits.masked_fill(~outputs, -1e9).div(temperature).softmax(1)
    student = logits[:, :count].masked_fill(~outputs, -1e9).div(temperature)
    return -(target * torch.log_softmax(student, 1)).masked_fill(~outputs, 0.0).sum(1)


# ---- Variants of SPECIAL that are not in the paper: what a round does without some clients'
# updates,
# and a lambda that the server chooses.

Missing = Literal["leave_out", "damp", "carry"]
"""What replaces the updates of clients that did not upload."""
_TINY = 1e-12
"""Smallest radius; with a first task that did not move the model, later tasks cannot either."""


@dataclass(frozen=True)
class AnchorState:
    """Server state: the anchor, and what the options need."""

    anchor: PreviousModel = field(default_factory=PreviousModel)
    """w^{k-1}; empty in the first task."""
    weight: float | None = None
    """lambda of the last round. None before the first round with an anchor."""
    last_update: Tensors = field(default_factory=dict)
    """`missing: carry`: the update of the last round of this task."""
    initial: Tensors = field(default_factory=dict)
    """`auto_lambda`: w^0, in the first task only."""
    first_distance: float = 0.0
    """`auto_lambda`: ||w^1 - w^0||, after the first task."""


def with_missing(update: Tensors, missing: Missing, fraction: float, last: Tensors) -> Tensors:
    """Return the aggregated update, given the fraction of sampled clients that uploaded.

    Args:
        update: The mean of the uploads.
        missing: `leave_out`: the mean. `damp`: fraction * mean. `carry`: fraction * mean +
            (1 - fraction) * last.
        fraction: Fraction of the round's sampled clients.
        last: The update of the last round of the task.

    """
    if missing == "leave_out":
        return update
    damped = scaled(update, fraction)
    last = last if missing == "carry" else {}
    return damped | {n: damped[n].add(last[n], alpha=1 - fraction) for n in damped if n in last}


def weight_within_reach(server: Server[AnchorState], step: Tensors, reach: float) -> float:
    """Return lambda = D / R, by which the model stays within R = reach * ||w^1 - w^0||."""
    anchor = server.state.anchor.params
    target = {name: server.params[name] + step[name] for name in step if name in anchor}
    return distance(target, anchor) / max(reach * server.state.first_distance, _TINY)


def towards_anchor(step: Tensors, start: Tensors, anchor: Tensors, weight: float) -> Tensors:
    """Return the change from `start` to (start + step + weight * anchor) / (1 + weight).

    Names that the anchor lacks change by `step`, and so do all of them without any weight.
    """
    names = [name for name in step if name in anchor and weight]
    return step | {
        name: (step[name] + weight * (anchor[name] - start[name])) / (1 + weight) for name in names
    }
