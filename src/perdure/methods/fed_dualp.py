"""Fed-DualP: DualPrompt trained by federated averaging."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from torch import Tensor

from perdure.config.section import Fixed, NonNegativeInt, Search
from perdure.contract.context import Context
from perdure.contract.exchanges import Exchange, Train
from perdure.contract.needs import Needs
from perdure.contract.step import Step
from perdure.methods.parts.prompting import (
    OPEN_TASK,
    PROMPTS_NEED,
    Keys,
    Prompting,
    matching_loss,
    opening_of_keys,
    prepare_slot,
    trained_with_keys,
)
from perdure.models.prompts import DualPrompts


@dataclass(frozen=True)
class FedDualP(Prompting):
    """DualPrompt trained by federated averaging, the baseline of PIP.

    A general prompt g is shared by all tasks; task t has an expert prompt e_t with a key k_t. Both
    are prefixes of the attention in some blocks of a frozen backbone:
        for each task: copy the expert prompt of the previous task (once; its key is not copied)
            for each round: clients train (g, e_t, k_t, head) on CE - lambda cos(query, k_t);
                the server takes the plain mean.
    At test time the nearest key chooses the expert of each example, which also predicts its task.
    Uploads are the updates of prompts, keys and head. With `keys: mean`, k_t is not trained: it is
    the mean direction of the task's queries, from a sum that clients send before training.

    Server state:
        seen: int. Number of tasks so far, whose experts may be chosen.

    Reference: Wang, Zhang, Ebrahimi, Sun, Zhang, Lee, Ren, Su, Perot, Dy, Pfister: DualPrompt:
    Complementary Prompting for Rehearsal-free Continual Learning, ECCV 2022; federated in the
    appendix of Ma'sum, Pratama, Ramasamy, Liu, Habibullah, Kowalczyk: PIP: Prototypes-Injected
    Prompt for Federated Class Incremental Learning, CIKM 2024.
    """

    general_layers: Annotated[tuple[NonNegativeInt, ...], Fixed()] = (0, 1)
    """Blocks with the general prompt g."""
    expert_layers: Annotated[tuple[NonNegativeInt, ...], Fixed()] = (2, 3, 4)
    """Blocks with the expert prompt e."""
    prefix: Literal["after", "before"] = "after"
    """Where prefixes join: after a block's projections, as keys and values, or before them, so that
    they are multiplied by W^K and W^V."""
    lambda_: Annotated[float, Field(alias="lambda", ge=0), Search(0.01, 2, log=True)] = 1.0
    """Weight of the matching loss; of no effect with `keys: mean`."""
    keys: Keys = "learned"
    """Keys of the experts: trained by the matching loss (learned), or the mean direction of the
    task's queries (mean, not in the papers), for which clients send a sum before training."""

    needs: ClassVar[Needs] = PROMPTS_NEED
    title: ClassVar[str] = "Fed-DualP"
    family: ClassVar[str] = "Prompts"
    idea: ClassVar[str] = "DualPrompt, averaged: a general prompt, and an expert prompt per task."
    paper: ClassVar[str] = "Wang et al., ECCV 2022; Ma'sum et al., CIKM 2024"

    @property
    def prompts(self) -> DualPrompts:
        """Prefixes: g, and per task e_t with its key."""
        layers = self.general_layers, self.expert_layers
        return DualPrompts(self.pool, self.length, *layers, projected=self.prefix == "before")

    def exchanges(self, context: Context) -> list[Exchange | Train]:
        """Copy the previous expert, then train (g, e_t, k_t, head); k_t unless it is a mean."""
        trainable = trained_with_keys(self.keys, context)
        train = Train(prepare=prepare_slot, loss=self.loss, trainable=trainable)
        return [OPEN_TASK, *opening_of_keys(self.keys), train]

    def loss(self, step: Step) -> Tensor:
        """Return CE - lambda * cos(query, k_t)."""
        return matching_loss(step, self.lambda_)
