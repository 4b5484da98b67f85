"""The final model of the previous task: as an anchor, or as the teacher of a distillation."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from perdure.contract.context import Client, Context, Server
from perdure.contract.exchanges import Exchange, OncePerTask
from perdure.contract.needs import Needs, Preferences
from perdure.contract.step import Step
from perdure.contract.uploads import CollectedUploads
from perdure.core.trees import Tensors

# ------------------------------------------------------------------------------------------------
# The final global model of the previous task, used as an anchor or a teacher in the next task.
# ------------------------------------------------------------------------------------------------


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


# ------------------------------------------------------------------------------------------------
# Distillation from the previous task's final model (the teacher).
#
# The server state is a `PreviousModel`, which clients receive once per task.
# ------------------------------------------------------------------------------------------------

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
