"""Fed-DualP: DualPrompt trained by federated averaging, the baseline of PIP.

Wang, Zhang, Ebrahimi, Sun, Zhang, Lee, Ren, Su, Perot, Dy, Pfister: DualPrompt: Complementary
Prompting for Rehearsal-free Continual Learning, ECCV 2022; federated in Ma'sum, Pratama, Ramasamy,
Liu, Habibullah, Kowalczyk: PIP: Prototypes-Injected Prompt for Federated Class Incremental
Learning, CIKM 2024, whose appendix has its pseudocode:
    for each task: copy the expert prompt of the task before (once, its key stays as it is)
        for each round: clients train (g, e_t, k_t, head) on CE - cos(query, k_t);
            the server takes the plain mean.
At test the nearest key, found for each example alone, chooses the expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from perdure.methods.parts.prompting import Prompting, dual_prompts
from perdure.models.prompts import Backbone, DualPrompts
from perdure.numbers import Natural


@dataclass(frozen=True)
class FedDualP(Prompting):
    """General and expert prefixes on a frozen backbone.

    length: tokens of a prompt (the paper's L_p).
    pool: expert prompts; one a task, so that it grows to the number of tasks if it is smaller.
    cache: compute the query of each row once and keep it; false: anew in every step.
    general_layers: blocks with the general prompt g.
    expert_layers: blocks with the expert prompt e.
    lambda: weight of the matching loss.
    """

    general_layers: tuple[Natural, ...] = (0, 1)
    expert_layers: tuple[Natural, ...] = (2, 3, 4)
    lambda_: Annotated[float, Field(alias="lambda", ge=0)] = 1.0

    paper: ClassVar[str] = "Wang et al., ECCV 2022; Ma'sum et al., CIKM 2024"

    def layout(self, backbone: Backbone, tasks: int) -> DualPrompts:
        """Prefixes: g and, for each task, e_t with its key."""
        return dual_prompts(
            backbone, tasks, self.pool, self.length, self.general_layers, self.expert_layers
        )

    def matching(self) -> float:
        """Lambda."""
        return self.lambda_
