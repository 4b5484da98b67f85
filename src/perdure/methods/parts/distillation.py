"""Distillation from the global model of the task before: how clients get it, and the loss.

The server's state is a `PreviousModel`, which clients receive once per task.
"""

from __future__ import annotations

import torch
from torch import Tensor

from perdure.contract import Client, Context, OncePerTask, Server, Step
from perdure.core.trees import Tensors
from perdure.methods.parts.previous_model import PreviousModel


def send_teacher(server: Server[PreviousModel], context: Context) -> dict[str, OncePerTask]:
    """Return the teacher and, if there are any, its running statistics."""
    teacher = server.state
    sent = {"teacher": OncePerTask(teacher.params)}
    return sent | {"teacher_buffers": OncePerTask(teacher.buffers)} if teacher.buffers else sent


def old_outputs(client: Client) -> Tensors:
    """Return the outputs of the tasks before the current one, as a tensor for `teacher_loss`."""
    context = client.context
    mask = context.network.outputs.seen_mask(context.task - 1)
    return {"old_outputs": mask.to(client.data.index.device)}


def teacher_loss(step: Step, temperature: float) -> Tensor:
    """Return the distillation of every row from the teacher, over the old outputs."""
    sent = step.broadcast
    teacher_logits = step.logits_of(sent["teacher"], sent.get("teacher_buffers", {}))
    return distillation_loss(
        step.logits(), teacher_logits, step.tensors["old_outputs"], temperature
    )


def distillation_loss(
    logits: Tensor, teacher_logits: Tensor, among: Tensor, temperature: float
) -> Tensor:
    """Return the cross-entropy of softened answers from a teacher's, one value per row.

    Args:
        logits: Of the model in training, [rows, outputs].
        teacher_logits: Of the teacher, [rows, outputs]. A teacher from before a growing head's newest
            block has fewer outputs; they are the first ones.
        among: bool [outputs]: the outputs that both softmaxes are over.
        temperature: Divides all logits.
    """
    count = teacher_logits.shape[1]
    among = among[:count]
    target = teacher_logits.masked_fill(~among, -1e9).div(temperature).softmax(1)
    student = logits[:, :count].masked_fill(~among, -1e9).div(temperature)
    return -(target * torch.log_softmax(student, 1)).masked_fill(~among, 0.0).sum(1)
