"""FedOMG: the server aligns the clients' updates."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from perdure.algebra.alignment import SearchSettings
from perdure.contract.context import Context, Server
from perdure.contract.exchanges import Exchange, Train
from perdure.contract.needs import Needs, Preferences
from perdure.contract.uploads import Change, CollectedUploads
from perdure.methods.parts.alignment import AligningMethod, AlignmentRecord, client_conflicts


@dataclass(frozen=True)
class FedOmg(AligningMethod):
    """On-server matching of gradients: the server aligns the clients' updates.

    Clients train as in FedAvg. In a round the server applies
        theta <- theta + eta_g GA(theta_1 - theta, ..., theta_U - theta)                        (4)
    with eta_g = `train.server_lr`, where GA is the conflict-averse combination of
    `algebra.alignment`: a direction near the mean update that no update opposes. Uploads are those
    of FedAvg, byte for byte, but the server must see each client's update.

    Server state, if `diagnostics` is on:
        clients: mean cosine between the clients' updates, and fraction of pairs in conflict.

    Differs from the paper: eq. 4 prints a minus, which is wrong for updates that descend.

    Reference: Nguyen, Zhao, Lin, Pham et al.: Federated Domain Generalization with Data-free
    On-server Matching Gradient, ICLR 2025; the server half of STAMP.
    """

    title: ClassVar[str] = "FedOMG"
    family: ClassVar[str] = "Alignment"
    idea: ClassVar[str] = "The server aligns the clients' updates instead of averaging them."
    paper: ClassVar[str] = "Nguyen et al., ICLR 2025"
    server_search: ClassVar[SearchSettings] = SearchSettings(steps=20, halve_every=None)
    needs: ClassVar[Needs] = Needs(
        prefers=Preferences(head={"split": "growing"}), per_client_fields=("update",)
    )

    def exchanges(self, context: Context) -> list[Exchange | Train]:
        """Train as in FedAvg, but combine the updates by alignment."""
        adjust = self.record if self.diagnostics else None
        return [Train(combine=self.align_clients, adjust=adjust, per_client_updates=True)]

    def record(
        self, server: Server, change: Change, uploads: CollectedUploads, context: Context
    ) -> Change:
        """Record the conflicts between updates; the change itself is unchanged."""
        return replace(change, state=AlignmentRecord(clients=client_conflicts(uploads)))
