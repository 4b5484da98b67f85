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

from perdure.config.types import FiniteFloat, Fraction, PositiveFloat
from perdure.contract import Client, Context, Exchange, Method, Prepared, Step, Train
from perdure.methods.parts.distillation import (
    distillation_loss,
    old_outputs,
    send_teacher,
    teacher_loss,
)
from perdure.methods.parts.previous_model import KEEP_PREVIOUS_MODEL, PreviousModel

_BUFFERS = "buffers."
"""Before the names of running statistics among a step's tensors."""


@dataclass(frozen=True)
class Flwf2T(Method):
    """Distillation from the previous model and from the server."""

    alpha: Fraction = 0.5
    """Weight of the cross-entropy."""
    beta: Annotated[FiniteFloat, Field(ge=0, le=1)] = 0.25
    """Weight of the distillation from the client's previous model; the rest is the server's."""
    temperature: PositiveFloat = 2.0
    """Temperature of all outputs (the paper's T)."""

    paper: ClassVar[str] = "Usmanova et al., SMARTCOMP 2022"
    ServerState: ClassVar[type] = PreviousModel

    def check_config(self, config: Any) -> str | None:
        """Refuse weights that leave less than nothing for the server's teacher."""
        if self.alpha + self.beta > 1:
            return f"method.beta: must be at most {1 - self.alpha} (1 - alpha), got {self.beta}"
        return None

    def exchanges(self, context: Context) -> list[Exchange | Train]:
        """Keep the model as the teacher of the past, and train with both teachers."""
        if context.task == 0:
            return [Train()]
        train = Train(
            broadcast=send_teacher, prepare=self.prepare, loss=self.classify, penalty=self.distill
        )
        return [KEEP_PREVIOUS_MODEL, train]

    def prepare(self, client: Client) -> Prepared:
        """Return the outputs of the tasks before, and the running statistics of the round."""
        statistics = {f"{_BUFFERS}{name}": value for name, value in client.buffers.items()}
        return Prepared(tensors=old_outputs(client) | statistics)

    def classify(self, step: Step) -> Tensor:
        """Return alpha L_class of every row."""
        return self.alpha * step.cross_entropy(step.logits())

    def distill(self, step: Step) -> Tensor:
        """Return beta L_past + (1 - alpha - beta) L_server of every row."""
        from_past = teacher_loss(step, self.temperature)
        from_server = self.from_server(step)
        return self.beta * from_past + (1 - self.alpha - self.beta) * from_server

    def from_server(self, step: Step) -> Tensor:
        """Return the distillation of every row from the model of this round, over all outputs."""
        named = {n: v for n, v in step.tensors.items() if n.startswith(_BUFFERS)}
        buffers = {name.removeprefix(_BUFFERS): value for name, value in named.items()}
        teacher_logits = step.logits_of(step.broadcast["params"], buffers)
        everything = torch.ones_like(teacher_logits[0], dtype=torch.bool)
        return distillation_loss(step.logits(), teacher_logits, everything, self.temperature)
