"""FedOMG: the server aligns the clients' updates instead of averaging them.

Nguyen, Zhao, Lin, Pham et al.: Federated Domain Generalization with Data-free On-server Matching
Gradient, ICLR 2025; the server half of STAMP (see stamp). In a round the server applies

    theta <- theta + eta_g GA(theta_1 - theta, ..., theta_U - theta)                        (4)

with eta_g = train.server_lr (eq. 4 prints a minus, which is wrong for updates that descend), GA
being the conflict-averse combination of algebra.alignment. The server must see every client's
update (an Each field); what travels is what FedAvg sends, byte for byte.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

from pydantic import Field

from perdure.algebra.alignment import (
    Alignment,
    Normalize,
    Rescale,
    Scope,
    SearchSettings,
    Solver,
)
from perdure.contract import (
    Change,
    CollectedUploads,
    Context,
    Exchange,
    Method,
    Needs,
    Server,
    Train,
)
from perdure.core.trees import Tensors, Tree
from perdure.methods.parts.alignment import AlignmentRecord, align_updates, client_conflicts

_SEARCH = SearchSettings(steps=20, halve_every=None)
"""Search for Gamma in FedOMG's published code."""


@dataclass(frozen=True)
class FedOmg(Method):
    """Aligned updates on the server; clients train as in FedAvg."""

    kappa: Annotated[float, Field(ge=0)] = 0.5
    """Search radius (the paper's kappa)."""
    normalize: bool = True
    """Scale all updates to their mean norm first (F.4.1)."""
    rescale: Rescale = "published"
    """Divide the aligned update by 1 + kappa^2 (published), by 1 + kappa (unit), or not (none)."""
    solver: Solver = "exact"
    """exact, or the authors' search (published)."""
    scope: Scope = "model"
    """One alignment of the whole model, or one per tensor (not in the paper)."""
    diagnostics_: Annotated[bool, Field(alias="diagnostics")] = False
    """Record the cosines between updates and the fraction of pairs in conflict (Figures 6 and
    22)."""

    paper: ClassVar[str] = "Nguyen et al., ICLR 2025"
    ServerState: ClassVar[type] = AlignmentRecord

    @property
    def needs(self) -> Needs:
        """The server aligns single updates."""
        return Needs(per_client_fields=("update",))

    @property
    def alignment(self) -> Alignment:
        """How the server aligns."""
        normalize: Normalize = "mean" if self.normalize else "none"
        return Alignment(self.kappa, normalize, self.rescale, self.solver, self.scope, _SEARCH)

    def exchanges(self, context: Context) -> list[Exchange | Train]:
        """Train as FedAvg does, with another way to combine the updates."""
        adjust = self.record if self.diagnostics_ else None
        return [Train(combine=self.align_clients, adjust=adjust, per_client_updates=True)]

    def align_clients(self, server: Server, uploads: CollectedUploads, context: Context) -> Tensors:
        """Return GA of the clients' updates (eq. 4)."""
        return align_updates(uploads, self.alignment)

    def record(
        self, server: Server, change: Change, uploads: CollectedUploads, context: Context
    ) -> Change:
        """Record how the updates agree; the change itself stays as it is."""
        return replace(change, state=AlignmentRecord(clients=client_conflicts(uploads)))

    def diagnostics(self, server: Server, context: Context) -> Tree:
        """Return what the last round recorded."""
        record: AlignmentRecord = server.state
        return record.tree()
