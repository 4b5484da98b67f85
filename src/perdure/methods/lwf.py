"""LwF + FL: a client's model goes on answering as the model of the task before did.

Li, Hoiem: Learning without Forgetting, IEEE TPAMI 2018. The loss in task k > 1 is
    L = L_new + lambda_o L_old,   L_old = - sum_i y'_o_i log yhat'_o_i,
y' the answers of the model of the task before on the new task's images and yhat' those of the
model in training, both over the old outputs and at temperature T (a softmax of logits / T). In a
federation the old model is the global one at the last task's end; clients get it once a task.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from perdure.methods.base import Batch, Client, Method, Net, Place, Server
from perdure.methods.special import past
from perdure.models.passes import Pass
from perdure.trees import Tensors, Tree


@dataclass(frozen=True)
class Lwf(Method):
    """Distillation from the model of the task before.

    lambda: weight of the distillation (the paper's lambda_o).
    temperature: of both models' answers (the paper's T).
    """

    lambda_: Annotated[float, Field(alias="lambda", ge=0)] = 1.0
    temperature: Annotated[float, Field(gt=0)] = 2.0

    paper: ClassVar[str] = "Li, Hoiem, TPAMI 2018"

    def begin_task(self, server: Server, place: Place) -> Server:
        """The model as it is now becomes the teacher."""
        return with_teacher(server, place)

    def broadcast_lasting(self, server: Server, place: Place) -> Tree:
        """The teacher, once a task."""
        return dict(server.memory)

    def prepare(self, client: Client) -> Tensors:
        """The outputs of the tasks before."""
        return old_outputs(client)

    def loss(self, net: Net, params: Tensors, batch: Batch, received: Tree, own: Tensors) -> Tensor:
        """L_new + lambda_o L_old."""
        logits = net.logits(params, batch.x)
        new = batch.cross_entropy(logits)
        if "teacher" not in received:
            return new
        taught = answers(net, received["teacher"], received.get("teacher_buffers", {}), batch)
        return new + self.lambda_ * distillation(
            batch, logits, taught, own["old"], self.temperature
        )

    def export(self, server: Server) -> Tree:
        """Prediction needs the model alone."""
        return {}


def with_teacher(server: Server, place: Place) -> Server:
    """The server with its present model kept as the teacher of a task that begins."""
    if place.task == 0:
        return server
    memory: Tree = {"teacher": past(server.params, place.task)}
    if server.buffers:
        memory["teacher_buffers"] = server.buffers
    return replace(server, memory=memory)


def old_outputs(client: Client) -> Tensors:
    """Which outputs answer for the tasks before the current one; nothing in the first task."""
    task = client.place.task
    if task == 0:
        return {}
    return {"old": client.place.network.outputs.seen(task - 1).to(client.shard.index.device)}


def answers(net: Net, teacher: Tensors, buffers: Tensors, batch: Batch) -> Tensor:
    """A teacher's logits, without gradient, as it would give them at test."""
    run = Pass(buffers=buffers, mask=batch.mask, mapped=net.run.lifted)
    return net.network.logits(teacher, batch.x, run).detach()


def distillation(
    batch: Batch, logits: Tensor, taught: Tensor, among: Tensor, temperature: float
) -> Tensor:
    """The mean cross-entropy of the student's softened answers from a teacher's, over some outputs.

    A teacher from before a growing head's newest slice has fewer outputs; they are the first ones.
    """
    count = taught.shape[1]
    among = among[:count]
    soft = taught.masked_fill(~among, -1e9).div(temperature).softmax(1)
    mine = logits[:, :count].masked_fill(~among, -1e9).div(temperature)
    return batch.mean(-(soft * torch.log_softmax(mine, 1)).masked_fill(~among, 0.0).sum(1))
