"""Fed-L2P: Learning to Prompt trained by federated averaging, a baseline of PIP.

Wang, Zhang, Lee, Zhang, Sun, Ren, Su, Perot, Dy, Pfister: Learning to Prompt for Continual
Learning, CVPR 2022; federated in Ma'sum et al.: PIP: Prototypes-Injected Prompt for Federated Class
Incremental Learning, CIKM 2024:
    for each task and round: clients train (prompts, keys, head) on
        CE - lambda * sum_k cos(query, k), over the keys k that are nearest to the query and whose
        prompts are put before the input;
        the server takes the plain mean.
The head gets the mean of the encoded prompt tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor

from perdure.config.types import PositiveInt
from perdure.contract import Context, Exchange, Step, Train
from perdure.methods.parts.prompting import OPEN_TASK, Prompting, matching_loss
from perdure.models.prompts import InputPrompts


@dataclass(frozen=True)
class FedL2P(Prompting):
    """A pool of prompts before the input of a frozen backbone."""

    top: PositiveInt = 5
    """Prompts per example."""
    lambda_: Annotated[float, Field(alias="lambda", ge=0)] = 0.1
    """Weight of the matching loss."""

    paper: ClassVar[str] = "Wang et al., CVPR 2022; Ma'sum et al., CIKM 2024"

    @property
    def prompts(self) -> InputPrompts:
        """Tokens at the input."""
        return InputPrompts(self.pool, self.length, self.top)

    def exchanges(self, context: Context) -> list[Exchange | Train]:
        """Train prompts, keys and head."""
        return [OPEN_TASK, Train(loss=self.loss)]

    def loss(self, step: Step) -> Tensor:
        """Return CE - lambda * sum_k cos(query, k)."""
        return matching_loss(step, self.lambda_)
