"""Distillation from the previous task's final model (the teacher).

The server state is a `PreviousModel`, which clients receive once per task.
"""

from __future__ import annotations

import torch
from torch import Tensor

from perdure.contract.context import Client, Context, Server
from perdure.contract.exchanges import OncePerTask
from perdure.contract.needs import Needs, Preferences
from perdure.contract.step import Step
from perdure.core.trees import Tensors
from perdure.methods.parts.anchors import PreviousModel

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
