"""STAMP: gradients aligned over tasks and clients, from a prototypical coreset."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from torch import Tensor

from perdure.algebra.alignment import Alignment, SearchSettings
from perdure.algebra.coresets import prototypical_loss
from perdure.config.section import Fixed, Search
from perdure.contract.context import Client, Context, Server
from perdure.contract.exchanges import Exchange, Train, stacked
from perdure.contract.method import Diagnosis
from perdure.contract.needs import Needs, Preferences
from perdure.contract.step import Scalar, Step
from perdure.contract.uploads import Change, ClientResult, CollectedUploads, Each, LocalUpdate, Sum
from perdure.methods.parts.alignment import (
    AligningMethod,
    AlignmentRecord,
    align_tasks,
    client_conflicts,
    conflicts_field,
    joined_directions,
    pair_statistics,
    task_conflicts,
)
from perdure.methods.parts.coreset import (
    CoresetMemory,
    CoresetSelector,
    Gradients,
    Selection,
    group_by_past_tasks,
    past_task_steps,
)

ProtoNet = Literal["none", "add", "encoder"]
_PUBLISHED_CLIENT_SEARCH = SearchSettings(momentum=0.1, steps=25)
"""Searches for Gamma in STAMP's published code."""


@dataclass(frozen=True)
class Stamp(AligningMethod):
    """Gradients aligned over a client's tasks and over clients, from a prototypical coreset.

    In a round, client u
        trains E epochs from theta to theta_u^E, on the cross-entropy and the loss of a prototypical
            network (eq. 7);
        computes d^t = theta_u^E - theta for the current task and, for each earlier task i, the
            negative gradient d^i at theta_u^E of the loss of the task's stored examples (Alg. 1,
            l. 14 to 17), scaled to the norm of d^t;
        sends eta GA(d^1 .. d^t),
    and the server applies GA to the clients' updates (eq. 4). At a task's end each client stores
    examples of each of its classes whose mean feature is near that of the class (eq. 5). A class
    has `budget` examples over all tasks; where it comes again, the stored ones take on the style of
    new ones (eq. 6). Uploads have the size of FedAvg's; if `spatial`, the server sees each client's
    update. The coreset never leaves the client.

    Table 2 switches off (1) `spatial`, (2) `temporal` and (3) `selection: matching, protonet: add`.

    Server state, if `diagnostics` is on: an `AlignmentRecord`.
    Client state: a `CoresetMemory`, whose examples are `StoredExamples`.

    Differs from the paper: its memory belongs to a class, so that a task whose classes come again
    would have none and no gradient (Alg. 1, l. 15). Eq. 3 takes the loss of the mean feature of a
    class (`gradients: prototype`); the loss of every stored example is measured to be far better.
    The coreset is chosen at a task's end, with the features learned by then.

    Reference: Exploiting Client Heterogeneity for Forgetting Mitigation in Federated Continual
    Learning: A Spatio-Temporal Gradient Alignment Approach (STAMP), 2025.
    """

    spatial: bool = True
    """The server aligns updates. If false, it averages them and needs only the sum."""
    temporal: bool = True
    """Clients align the gradients of their tasks."""
    eta: Annotated[Annotated[float, Field(gt=0)] | None, Search(0.25, 4, log=True)] = None
    """Step of the clients' alignment. Default: 1, or 2 with `scale: published`, as in the authors'
    code."""
    client_kappa: Annotated[Annotated[float, Field(ge=0)] | None, Search(0.1, 0.9)] = None
    """Search radius on clients. Default: `kappa`."""
    budget: Annotated[int, Field(ge=1), Fixed()] = 20
    """Examples per class that a client stores (|M^l|), divided among the tasks in which it had the
    class, of which each has one at least: with C classes at most C * budget rows, if no class is in
    more than `budget` tasks."""
    selection: Selection = "matching"
    """Choice of stored examples: the one of 100 random sets whose mean feature is nearest to the
    class's (matching), one by one towards that mean (herding), eq. 5 as printed (literal), or
    random."""
    mixstyle: bool = True
    """Apply eq. 6 where a class comes again and its examples exceed the budget: those of earlier
    tasks take on the style of the new task's. If false, they stay as they are."""
    gradients: Gradients = "sample"
    """Loss of an earlier task: that of every stored example (sample), or that of each class's mean
    feature, through the body (prototype, the letter of eq. 3)."""
    protonet: ProtoNet = "add"
    """eq. 7: added to the cross-entropy (add), alone for the body with the cross-entropy for the
    head (encoder, as in the published code), or none."""
    protonet_weight: Annotated[float, Field(gt=0), Search(0.003, 0.3, log=True)] = 0.03
    """Weight of eq. 7, added to the cross-entropy or alone for the body."""

    title: ClassVar[str] = "STAMP"
    family: ClassVar[str] = "Alignment"
    idea: ClassVar[str] = "Gradients are aligned over a client's tasks and over the clients."
    paper: ClassVar[str] = "STAMP, 2025"
    ClientState: ClassVar[type] = CoresetMemory

    @property
    def needs(self) -> Needs:
        """Let the server see each client's update if it aligns them."""
        fields = ("update",) if self.spatial else ()
        prefers = Preferences(head={"split": "shared"})
        return Needs(classes=True, prefers=prefers, per_client_fields=fields)

    def check_config(self, config: Any) -> str | None:
        """Refuse MixStyle on text, whose tokens have no style to mix."""
        if config.model.reads_text and self.temporal and self.mixstyle:
            return "method.mixstyle: must be false with model.kind text, got True"
        return None

    def diagnose(self, server: Server, context: Context) -> Diagnosis:
        """Name eta too, by which clients scale aligned updates."""
        found = super().diagnose(server, context)
        eta = f"eta {self.client_step:g} of stamp (try 1)"
        return replace(found, divergence=f"{eta}, or {found.divergence}")

    @property
    def client_alignment(self) -> Alignment:
        """How a client aligns its tasks: directions are scaled to the current task's norm."""
        kappa = self.kappa if self.client_kappa is None else self.client_kappa
        return self.alignment_by(kappa, "last", _PUBLISHED_CLIENT_SEARCH)

    @property
    def client_step(self) -> float:
        """The factor of a client's aligned direction."""
        return self.eta or (2.0 if self.scale == "published" else 1.0)

    def exchanges(self, context: Context) -> list[Exchange | Train]:
        """Train with aligned gradients; then every client updates its coreset alone."""
        aligns_tasks = self.temporal and context.task > 0
        train = Train(
            loss=self.head_loss if self.protonet == "encoder" else None,
            penalty=None if self.protonet == "none" else self.prototypical_loss,
            make_upload=self.align_gradients if aligns_tasks or self.diagnostics else None,
            combine=self.align_clients if self.spatial else None,
            adjust=self.record if self.diagnostics else None,
            per_client_updates=self.spatial,
        )
        coreset = Exchange("coreset", client_work=self.update_coreset)
        return [train, coreset] if self.temporal else [train]

    def prototypical_loss(self, step: Step) -> Scalar:
        """Return the loss of eq. 7 over all rows of the step.

        It is no mean over rows, since a row that is alone in its class does not count.
        """
        outputs = step.logits().shape[1]
        loss = prototypical_loss(step.features(), step.batch.y, step.batch.mask, outputs)
        return Scalar(self.protonet_weight * loss)

    def head_loss(self, step: Step) -> Tensor:
        """Return a cross-entropy that trains the head alone."""
        return step.cross_entropy(step.classify(step.features().detach()))

    @stacked
    def align_gradients(self, clients: list[Client], local: LocalUpdate) -> ClientResult:
        """Send eta GA(d^1 .. d^t) of each client, or d^t if it has no past task."""
        update = {name: value.clone() for name, value in local.update.items()}
        statistics = next(iter(update.values())).new_zeros(len(clients), 3)
        for rows in group_by_past_tasks(clients):
            current = {name: value[rows] for name, value in update.items()}
            past = past_task_steps([clients[row] for row in rows], current, self.gradients)
            directions = joined_directions(past, current)
            aligned = align_tasks(directions, current, self.client_alignment, self.client_step)
            for name, value in aligned.items():
                update[name][rows] = value
            if self.diagnostics:
                statistics[rows] = pair_statistics(directions).to(statistics)
        fields: dict[str, Sum | Each] = {"update": Each(update) if self.spatial else Sum(update)}
        return ClientResult(fields | (conflicts_field(statistics) if self.diagnostics else {}))

    def update_coreset(self, client: Client) -> ClientResult:
        """Return the coreset, with examples of the finished task added (eqs. 5 and 6)."""
        selector = CoresetSelector(self.budget, self.selection, self.mixstyle)
        return ClientResult(state=selector.after_task(client))

    def record(
        self, server: Server, change: Change, uploads: CollectedUploads, context: Context
    ) -> Change:
        """Record the conflicts between clients and between tasks; the change is not altered."""
        clients = client_conflicts(uploads) if self.spatial else None
        return replace(change, state=AlignmentRecord(clients, task_conflicts(uploads)))
