"""Fed-L2P: Learning to Prompt trained by federated averaging."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor

from perdure.config.section import Fixed, PositiveInt, Search
from perdure.contract.context import Context
from perdure.contract.exchanges import Exchange, Train
from perdure.contract.needs import Needs
from perdure.contract.step import Step
from perdure.methods.parts.prompting import OPEN_TASK, PROMPTS_NEED, Prompting, matching_loss
from perdure.models.prompts import InputPrompts


@dataclass(frozen=True)
class FedL2P(Prompting):
    """Learning to Prompt trained by federated averaging, a baseline of PIP.

    All tasks share a pool of prompts with keys. The `top` prompts whose keys are nearest to an
    example's query are put before the input of a frozen backbone; the head gets the mean of the
    encoded prompt tokens:
        for each task and round: clients train (prompts, keys, head) on
            CE - lambda sum_k cos(query, k), over the chosen keys k;
            the server takes the plain mean.
    Uploads are the updates of prompts, keys and head.

    Server state:
        seen: int. Number of tasks so far.

    Reference: Wang, Zhang, Lee, Zhang, Sun, Ren, Su, Perot, Dy, Pfister: Learning to Prompt for
    Continual Learning, CVPR 2022; federated in Ma'sum et al.: PIP: Prototypes-Injected Prompt for
    Federated Class Incremental Learning, CIKM 2024.
    """

    top: Annotated[PositiveInt, Fixed()] = 5
    """Prompts per example."""
    lambda_: Annotated[float, Field(alias="lambda", ge=0), Search(0.01, 2, log=True)] = 0.1
    """Weight of the matching loss."""

    needs: ClassVar[Needs] = PROMPTS_NEED
    title: ClassVar[str] = "Fed-L2P"
    family: ClassVar[str] = "Prompts"
    idea: ClassVar[str] = "Learning to Prompt, averaged: queries choose prompts of a shared pool."
    paper: ClassVar[str] = "Wang et al., CVPR 2022; Ma'sum et al., CIKM 2024"

    @property
    def prompts(self) -> InputPrompts:
        """Tokens before the input."""
        return InputPrompts(self.pool, self.length, self.top)

    def exchanges(self, context: Context) -> list[Exchange | Train]:
        """Train prompts, keys and head."""
        return [OPEN_TASK, Train(loss=self.loss)]

    def loss(self, step: Step) -> Tensor:
        """Return CE - lambda * sum_k cos(query, k)."""
        return matching_loss(step, self.lambda_)
