"""LwF + FL: the outputs of earlier tasks keep answering as the model of the task before did.

Li, Hoiem: Learning without Forgetting, IEEE TPAMI 2018. The loss in task k > 1 is
    L = L_new + lambda_o L_old,   L_old = - sum_i y'_o_i log yhat'_o_i,
y' the answers of the model of the task before on the new task's images and yhat' those of the
model in training, both over the old outputs and at temperature T (a softmax of logits / T). In a
federation the old model is the global one at the last task's end; clients get it once per task.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor

from perdure.config.types import NonNegativeFloat, PositiveFloat
from perdure.contract import Client, Context, Exchange, Method, Prepared, Step, Train
from perdure.methods.parts.distillation import old_outputs, send_teacher, teacher_loss
from perdure.methods.parts.previous_model import KEEP_PREVIOUS_MODEL, PreviousModel


@dataclass(frozen=True)
class Lwf(Method):
    """Distillation from the model of the previous task."""

    lambda_: Annotated[NonNegativeFloat, Field(alias="lambda")] = 1.0
    """Weight of the distillation (the paper's lambda_o)."""
    temperature: PositiveFloat = 2.0
    """Temperature of both models' outputs (the paper's T)."""

    paper: ClassVar[str] = "Li, Hoiem, TPAMI 2018"
    ServerState: ClassVar[type] = PreviousModel

    def exchanges(self, context: Context) -> list[Exchange | Train]:
        """Keep the model as the teacher of a task that begins, and train with its distillation."""
        if context.task == 0:
            return [Train()]
        train = Train(broadcast=send_teacher, prepare=self.prepare, penalty=self.distill)
        return [KEEP_PREVIOUS_MODEL, train]

    def prepare(self, client: Client) -> Prepared:
        """Return the outputs of the tasks before."""
        return Prepared(tensors=old_outputs(client))

    def distill(self, step: Step) -> Tensor:
        """Return lambda_o L_old of every row; L_new is the cross-entropy."""
        return self.lambda_ * teacher_loss(step, self.temperature)
