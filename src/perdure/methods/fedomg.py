"""FedOMG: the server aligns the clients' updates instead of averaging them.

Nguyen, Zhao, Lin, Pham et al.: Federated Domain Generalization with Data-free On-server Matching
Gradient, ICLR 2025; the server half of STAMP (see stamp). The server must see every client's update
(an Each field); what travels is what FedAvg sends, byte for byte.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from perdure.algebra.alignment import (
    FEDOMG,
    Alignment,
    Array,
    Recipe,
    Rescale,
    Scope,
    Solver,
    align_models,
    cosines,
    model_grams,
)
from perdure.federation.messages import Each, Report, Upload
from perdure.methods.base import Client, Finish, Method, Place, Server, default_upload
from perdure.trees import Tensors, Tree


@dataclass(frozen=True)
class FedOmg(Method):
    """theta <- theta + global_lr GA(theta_1 - theta, ..., theta_U - theta), eq. 4.

    (Eq. 4 prints a minus, which is wrong for updates that descend.)

    kappa: the search radius. normalize: bring all updates to their mean norm first (F.4.1).
    rescale: divide GA by 1 + kappa^2 as the published code does, by 1 + kappa (unit), or not.
    solver: exact, or the authors' search (published). scope: one alignment of the whole model, or
    one of each tensor (ours). diagnostics: record the cosines between updates and the share of
    pairs in conflict (Figures 6 and 22).
    """

    kappa: Annotated[float, Field(ge=0)] = 0.5
    normalize: bool = True
    rescale: Rescale = "published"
    solver: Solver = "exact"
    scope: Scope = "model"
    global_lr: Annotated[float, Field(gt=0)] = 1.0
    diagnostics: bool = False

    paper: ClassVar[str] = "Nguyen et al., ICLR 2025"
    recipe: ClassVar[Recipe] = FEDOMG

    @property
    def alignment(self) -> Alignment:
        """How the server aligns."""
        normalize: Literal["mean", "none"] = "mean" if self.normalize else "none"
        return Alignment(
            self.kappa, normalize, self.rescale, self.solver, self.scope, self.recipe
        )  # fmt: skip

    def has_own(self, name: str) -> bool:
        """The server's half of a round is changed only to record what it saw."""
        return self.diagnostics if name == "aggregate" else super().has_own(name)

    def shown_fields(self) -> tuple[str, ...]:
        """The server aligns the single updates."""
        return ("update",)

    def combine(self, report: Report, server: Server, place: Place) -> Tensors:
        """GA of the clients' updates."""
        aligned = align_models(list(report.each["update"].values()), self.alignment)
        return {name: self.global_lr * value for name, value in aligned.items()}

    def aggregate(self, server: Server, report: Report, place: Place) -> Server:
        """A round as usual; on request with what the updates had to do with each other."""
        after = super().aggregate(server, report, place)
        if not self.diagnostics:
            return after
        seen = self._seen(report)
        return replace(after, memory=after.memory | {"seen": seen})

    def _seen(self, report: Report) -> Tree:
        gram = model_grams(list(report.each["update"].values())).sum(0)
        return {"clients": conflicts(cosines(gram))}

    def diagnose(self, server: Server, place: Place) -> Tree:
        """What the last round saw."""
        seen: Any = server.memory.get("seen", {})
        return dict(seen)

    def export(self, server: Server) -> Tree:
        """Prediction needs the model alone."""
        return {}

    def finish(self, client: Client, update: Tensors, buffers: Tensors) -> Finish:
        """The update, for the server to see."""
        return Finish(self.finish_all([client], update, buffers))

    def finish_all(self, clients: list[Client], update: Tensors, buffers: Tensors) -> Upload:
        """The updates, for the server to see."""
        return visible(update, buffers)


def visible(update: Tensors, buffers: Tensors) -> Upload:
    """What FedAvg sends, with an update that the server sees client by client."""
    return {**default_upload(update, buffers), "update": Each(update)}


def conflicts(found: Array) -> Tree:
    """The mean cosine over all pairs and the share of pairs below zero."""
    if found.size == 0:
        return {"cosine": None, "conflicts": None}
    return {"cosine": float(found.mean()), "conflicts": float(np.mean(found < 0))}
