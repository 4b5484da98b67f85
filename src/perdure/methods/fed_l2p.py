"""Fed-L2P: Learning to Prompt trained by federated averaging, a baseline of PIP.

Wang, Zhang, Lee, Zhang, Sun, Ren, Su, Perot, Dy, Pfister: Learning to Prompt for Continual
Learning, CVPR 2022; federated in Ma'sum et al.: PIP: Prototypes-Injected Prompt for Federated Class
Incremental Learning, CIKM 2024:
    for each task and round: clients train (prompts, keys, head) on
        CE - lambda * sum_k cos(query, k), over the keys k that are nearest to the query and whose
        prompts are put before the input;
        the server takes the plain mean.
The head gets the mean of what becomes of the prompt tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from perdure.methods.parts.prompting import Prompting, input_prompts
from perdure.models.prompts import Backbone, InputPrompts
from perdure.numbers import Count


@dataclass(frozen=True)
class FedL2P(Prompting):
    """A pool of prompts before the input of a frozen backbone.

    length: tokens of a prompt (the paper's L_p).
    pool: prompts, shared by all tasks.
    cache: compute the query of each row once and keep it; false: anew in every step.
    top: prompts that each example gets.
    lambda: weight of the matching loss.
    """

    top: Count = 5
    lambda_: Annotated[float, Field(alias="lambda", ge=0)] = 0.1

    paper: ClassVar[str] = "Wang et al., CVPR 2022; Ma'sum et al., CIKM 2024"

    def layout(self, backbone: Backbone, tasks: int) -> InputPrompts:
        """Tokens at the input."""
        return input_prompts(self.pool, self.length, self.top)

    def matching(self) -> float:
        """Lambda."""
        return self.lambda_
