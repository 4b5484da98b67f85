"""LwF: distillation from the model of the previous task."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor

from perdure.config.section import Fixed, NonNegativeFloat, PositiveFloat, Search
from perdure.contract.context import Client, Context
from perdure.contract.exchanges import Exchange, Prepared, Train
from perdure.contract.method import Method
from perdure.contract.needs import Needs
from perdure.contract.step import Step
from perdure.methods.parts.previous_model import (
    KEEP_PREVIOUS_MODEL,
    NEEDS_OF_DISTILLATION,
    PreviousModel,
    old_outputs,
    send_teacher,
    teacher_loss,
)


@dataclass(frozen=True)
class Lwf(Method):
    """Learning without forgetting: distillation from the model of the previous task (the teacher).

    The loss in task k > 1 is
        L = L_new + lambda_o L_old,   L_old = - sum_i y'_o_i log yhat'_o_i,
    where L_new is the cross-entropy over the outputs of the new task, y' are the teacher's
    probabilities on the new task's examples and yhat' those of the trained model, both over the
    outputs of earlier tasks and at temperature T (a softmax of logits / T). Old and new outputs are
    trained. The teacher is the global model at the end of the previous task, which clients receive
    once per task. Uploads are those of FedAvg; the first task is FedAvg.

    With `train.outputs: seen` or `all`, L_new also lowers all old logits of new examples. L_old
    does not notice, since a softmax does not change if all its logits do by the same amount; old
    classes are never predicted then, as with FedAvg.

    Server state, of the previous task's final model:
        params: float, by parameter name. Without the outputs that the current task added.
        buffers: float, by name. Running statistics.

    Reference: Li, Hoiem: Learning without Forgetting, IEEE TPAMI 2018.
    """

    lambda_: Annotated[NonNegativeFloat, Field(alias="lambda"), Search(0.1, 10, log=True)] = 1.0
    """Weight of the distillation (the paper's lambda_o)."""
    temperature: Annotated[PositiveFloat, Fixed()] = 2.0
    """Temperature of both models' outputs (the paper's T)."""

    title: ClassVar[str] = "LwF"
    family: ClassVar[str] = "Regularization and distillation"
    idea: ClassVar[str] = "Outputs of earlier tasks are distilled from the previous task's model."
    paper: ClassVar[str] = "Li, Hoiem, TPAMI 2018"
    ServerState: ClassVar[type] = PreviousModel
    needs: ClassVar[Needs] = NEEDS_OF_DISTILLATION

    def exchanges(self, context: Context) -> list[Exchange | Train]:
        """Store the model as the teacher of the task, then train with its distillation loss."""
        if context.task == 0:
            return [Train()]
        train = Train(
            broadcast=send_teacher,
            prepare=self.prepare,
            penalty=self.distill,
            trainable=tuple(context.parameters),  # the outputs of all tasks
        )
        return [KEEP_PREVIOUS_MODEL, train]

    def prepare(self, client: Client) -> Prepared:
        """Return the mask of the outputs of earlier tasks."""
        return Prepared(tensors=old_outputs(client))

    def distill(self, step: Step) -> Tensor:
        """Return lambda_o L_old of every row; L_new is the cross-entropy."""
        return self.lambda_ * teacher_loss(step, self.temperature)
