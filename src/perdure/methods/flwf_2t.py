"""FLwF-2T: distillation from two teachers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from perdure.config.section import FiniteFloat, Fixed, Fraction, PositiveFloat, Search
from perdure.contract.context import Client, Context
from perdure.contract.exchanges import Exchange, Prepared, Train
from perdure.contract.method import Method
from perdure.contract.needs import Needs
from perdure.contract.step import Step
from perdure.methods.parts.previous_model import (
    KEEP_PREVIOUS_MODEL,
    NEEDS_OF_DISTILLATION,
    PreviousModel,
    distillation_loss,
    old_outputs,
    send_teacher,
    teacher_loss,
)

_BUFFERS = "buffers."
"""Prefix of the names of running statistics among a step's tensors."""


@dataclass(frozen=True)
class Flwf2T(Method):
    """Federated learning without forgetting with two teachers.

    The loss of a client in task k > 1 is
        L = alpha L_class + beta L_past + (1 - alpha - beta) L_server,
    with the cross-entropy L_class over the outputs of the new task (see `lwf`), and two
    distillation losses at temperature T: L_past from the final model of the previous task,
    over the outputs of earlier tasks, and L_server from the server's model of this round, over all
    outputs, which preserves what other clients have learned. Clients receive the first teacher once
    per task. Uploads are those of FedAvg; the first task is FedAvg.

    Server state, of the previous task's final model:
        params: float, by parameter name. Without the outputs that the current task added.
        buffers: float, by name. Running statistics.

    Differs from the paper: the teacher of the past is the global model (the paper: the client's own
    model of that time), so that clients without data of the previous task have it, too. The
    defaults of alpha and beta are ours: one half for the class and a quarter for each teacher.

    Reference: Usmanova, Portet, Lalanda, Vega: A distillation-based approach integrating continual
    learning and federated learning for pervasive services, 2021; Federated Continual Learning
    through distillation in pervasive computing, SMARTCOMP 2022.
    """

    alpha: Annotated[Fraction, Search(0.2, 0.6)] = 0.5
    """Weight of the cross-entropy."""
    beta: Annotated[FiniteFloat, Field(ge=0, le=1), Search(0.1, 0.4)] = 0.25
    """Weight of the distillation from the client's previous model; the rest is the server's."""
    temperature: Annotated[PositiveFloat, Fixed()] = 2.0
    """Temperature of all outputs (the paper's T)."""

    title: ClassVar[str] = "FLwF-2T"
    family: ClassVar[str] = "Regularization and distillation"
    idea: ClassVar[str] = "Distillation from two teachers: the previous task's and the server's."
    paper: ClassVar[str] = "Usmanova et al., SMARTCOMP 2022"
    ServerState: ClassVar[type] = PreviousModel
    needs: ClassVar[Needs] = NEEDS_OF_DISTILLATION

    def check_config(self, config: Any) -> str | None:
        """Refuse weights that leave a negative weight for the server's teacher."""
        if self.alpha + self.beta > 1:
            return f"method.beta: must be at most {1 - self.alpha} (1 - alpha), got {self.beta}"
        return None

    def exchanges(self, context: Context) -> list[Exchange | Train]:
        """Store the model as the teacher of the past, then train with both teachers."""
        if context.task == 0:
            return [Train()]
        train = Train(
            broadcast=send_teacher,
            prepare=self.prepare,
            loss=self.classify,
            penalty=self.distill,
            trainable=tuple(context.parameters),  # the outputs of all tasks
        )
        return [KEEP_PREVIOUS_MODEL, train]

    def prepare(self, client: Client) -> Prepared:
        """Return the mask of the outputs of earlier tasks, and the round's running statistics."""
        statistics = {f"{_BUFFERS}{name}": value for name, value in client.buffers.items()}
        return Prepared(tensors=old_outputs(client) | statistics)

    def classify(self, step: Step) -> Tensor:
        """Return alpha L_class of every row."""
        return self.alpha * step.cross_entropy(step.logits())

    def distill(self, step: Step) -> Tensor:
        """Return beta L_past + (1 - alpha - beta) L_server of every row."""
        past = teacher_loss(step, self.temperature)
        return self.beta * past + (1 - self.alpha - self.beta) * self.server_loss(step)

    def server_loss(self, step: Step) -> Tensor:
        """Return the distillation loss of every row from the round's model, over all outputs."""
        named = {n: v for n, v in step.tensors.items() if n.startswith(_BUFFERS)}
        buffers = {name.removeprefix(_BUFFERS): value for name, value in named.items()}
        teacher_logits = step.logits_of(step.broadcast["params"], buffers)
        all_outputs = torch.ones_like(teacher_logits[0], dtype=torch.bool)
        return distillation_loss(step.logits(), teacher_logits, all_outputs, self.temperature)
