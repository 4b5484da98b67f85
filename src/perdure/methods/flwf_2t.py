"""FLwF-2T: Federated Learning without Forgetting with two teachers.

Usmanova, Portet, Lalanda, Vega: A distillation-based approach integrating continual learning and
federated learning for pervasive services, 2021; Federated Continual Learning through distillation
in pervasive computing, SMARTCOMP 2022. The loss of a client in task k > 1 is
    L = alpha L_class + beta L_past + (1 - alpha - beta) L_server,
two distillations at temperature T: from the model of the task before, over the old outputs, and
from the server's model of this round, over all of them. The second keeps what other clients know.

Ours: the teacher of the past is the global model at the last task's end (the paper: the client's
own model of that time), so that a client that missed the task has it too; and the defaults of alpha
and beta, half for the class and a quarter for each teacher. The first task is FedAvg.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from perdure.methods.base import Batch, Client, Method, Net, Place, Server
from perdure.methods.lwf import answers, distillation, old_outputs, with_teacher
from perdure.trees import Tensors, Tree


@dataclass(frozen=True)
class Flwf2T(Method):
    """Distillation from the past and from the server.

    alpha: weight of the cross-entropy; beta: of the teacher of the past; the rest is the server's.
    temperature: of all answers (the paper's T).
    """

    alpha: Annotated[float, Field(gt=0, le=1)] = 0.5
    beta: Annotated[float, Field(ge=0, le=1)] = 0.25
    temperature: Annotated[float, Field(gt=0)] = 2.0

    paper: ClassVar[str] = "Usmanova et al., SMARTCOMP 2022"

    def refuse(self, config: Any) -> str | None:
        """The weights must leave something, or nothing, for the server's teacher."""
        if self.alpha + self.beta > 1:
            return f"method.beta: got {self.beta}, allowed: at most {1 - self.alpha} (1 - alpha)"
        return super().refuse(config)

    def begin_task(self, server: Server, place: Place) -> Server:
        """The model as it is now becomes the teacher of the past."""
        return with_teacher(server, place)

    def broadcast_lasting(self, server: Server, place: Place) -> Tree:
        """The teacher of the past, once a task. The server's teacher is the model of the round."""
        return dict(server.memory)

    def prepare(self, client: Client) -> Tensors:
        """The outputs of the tasks before, and the running statistics that came with the model."""
        own = old_outputs(client)
        return own | {f"buffers.{n}": v for n, v in client.buffers.items()} if own else own

    def loss(self, net: Net, params: Tensors, batch: Batch, received: Tree, own: Tensors) -> Tensor:
        """Alpha L_class + beta L_past + (1 - alpha - beta) L_server."""
        logits = net.logits(params, batch.x)
        new = batch.cross_entropy(logits)
        if "teacher" not in received:
            return new
        buffers = {n.removeprefix("buffers."): v for n, v in own.items() if n != "old"}
        past = answers(net, received["teacher"], received.get("teacher_buffers", {}), batch)
        server = answers(net, received["params"], buffers, batch)
        everything = torch.ones_like(logits[0], dtype=torch.bool)
        from_past = distillation(batch, logits, past, own["old"], self.temperature)
        from_server = distillation(batch, logits, server, everything, self.temperature)
        rest = 1 - self.alpha - self.beta
        return self.alpha * new + self.beta * from_past + rest * from_server

    def export(self, server: Server) -> Tree:
        """Prediction needs the model alone."""
        return {}
