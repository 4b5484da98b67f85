"""PIP: prototypes injected into prompt learning."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal

from perdure.algebra.class_statistics import Gaussians
from perdure.config.section import NonNegativeInt, Search
from perdure.contract.context import Client, Context, Server
from perdure.contract.exchanges import Exchange, Prepared, Train
from perdure.contract.needs import Needs
from perdure.contract.step import Scalar, Step
from perdure.contract.uploads import Change, ClientResult, CollectedUploads, LocalUpdate, Sum
from perdure.core.trees import Tensors, Tree, add
from perdure.methods.parts.closed_form import warn_of_missing_classes
from perdure.methods.parts.prompting import (
    PROMPTS_NEED,
    EitherPrompting,
    PromptState,
    augment_prototypes,
    class_moments,
    inject_prototypes,
    no_prototypes,
    open_task,
    opening_of_keys,
    prompted_step_features,
    task_slot,
    trained_with_keys,
)


@dataclass(frozen=True)
class PipServerState(PromptState):
    """Server state."""

    prototypes: Gaussians | None = None
    """Z_G: one Gaussian per class of the task. None if prototypes are off."""


@dataclass(frozen=True)
class PipClientState:
    """Client state."""

    rho: int = 0
    """Rounds in which the client took part, over all tasks so far."""
    task: int = -1
    """Task of the stored head; -1 if there is none."""
    head: Tensors = field(default_factory=dict)
    """The client's head by parameter name, with `average_head: task_end`."""


@dataclass(frozen=True)
class Pip(EitherPrompting):
    """Prototypes injected into prompt learning: prompts, class prototypes and weighted averages.

        for each task:  Z_G = {}
            for each round, a client
                trains prompts and head on its examples and on the prototypes Z_G and their
                    augmentations, which are inputs of the head (eqs. 9 to 11);
                computes the mean and variance of its head inputs per class (eqs. 7 and 8);
                counts this participation: omega_l = rho_l * |T_l|.
            The server takes means weighted by omega: of prompts and head (eqs. 12 and 13), and of
                the classes' first two moments over the clients with the class (eqs. 14 and 15).

    A client sends its update and the moments as sums with the weight omega_l, which it computes
    alone (up to a common factor). It receives Z_G, one Gaussian per class of the task.

    Server state: a `PipServerState`. Client state: a `PipClientState`.

    Differs from the paper, or the paper leaves it open: all classes of the task are injected, also
    the client's own, without weights; beta is drawn per coordinate and local epoch; rho counts over
    all tasks so far; the head is averaged in every round; a class that no client has in a round
    keeps its prototype; prototypes of a task's last round are not used and not computed. Not in the
    paper: `keys: mean`.

    Table 5 switches off `prototypes` (A, C, E, G), `weighted` (A, B, E, F) and the mean of heads,
    `average_head: never` (A, B, C, D), with prompts in all cases.

    Reference: Ma'sum, Pratama, Ramasamy, Liu, Habibullah, Kowalczyk: PIP: Prototypes-Injected
    Prompt for Federated Class Incremental Learning, CIKM 2024 (Algorithm 1).
    """

    prototypes: bool = True
    """Add the classes' prototypes to the loss of the head."""
    augment: Annotated[NonNegativeInt, Search(1, 5)] = 2
    """Augmented prototypes per class (the paper's m); with 0 the means alone."""
    sign: Literal["plus", "both"] = "plus"
    """Augment on one side (plus: mu + beta sigma, the paper's) or on both in turn."""
    weighted: bool = True
    """Average by omega, participations times examples. If false, the plain mean."""
    average_head: Literal["every_round", "task_end", "never"] = "every_round"
    """every_round: average the head in every round. task_end: clients keep their heads from round
    to round, which are averaged in the task's last round. never: every client keeps its head, and
    accuracies are means over the clients' models."""

    title: ClassVar[str] = "PIP"
    family: ClassVar[str] = "Prompts"
    idea: ClassVar[str] = "Prompts on a frozen backbone, and class prototypes that clients share."
    paper: ClassVar[str] = "Ma'sum et al., CIKM 2024"
    ServerState: ClassVar[type] = PipServerState
    ClientState: ClassVar[type] = PipClientState

    @property
    def needs(self) -> Needs:
        """With weights, a client counts omega, of which `participation_scale` leaves < 2 * rows."""
        old, own = PROMPTS_NEED.prefers, "its averages have the weights of the paper"
        prefers = replace(old, demanded={**old.demanded, "weighting": own})
        needs = replace(PROMPTS_NEED, classes=True, prefers=prefers)
        if not self.weighted:
            return needs
        return replace(needs, prefers=replace(prefers, weighting="own"), max_client_weight=2.0)

    def check_config(self, config: Any) -> str | None:
        """Refuse other weights than omega, and clipping of more than the update."""
        weighting, clip = config.train.weighting, config.privacy.clip
        if clip is not None and self.prototypes:
            reason = "since noise would make prototypes of classes that no client has"
            return f"method.prototypes: must be false with privacy.clip, {reason}, got True"
        if clip is not None and self.weighted:
            reason = "since it requires equal weights"
            return f"method.weighted: must be false with privacy.clip, {reason}, got True"
        own = "samples" if self.weighted else "uniform"
        if weighting not in (None, own):
            expected = f"null or {own!r} with pip"
            reason = "since method.weighted sets the clients' weights"
            return f"train.weighting: must be {expected}, {reason}, got {weighting!r}"
        return super().check_config(config)

    def exchanges(self, context: Context) -> list[Exchange | Train]:
        """Set Z_G = {} and perhaps the task's key, then train prompts and head with prototypes."""
        never = self.average_head == "never"  # the head never leaves a client
        train = Train(
            broadcast=self.send_prototypes if self.prototypes else None,
            prepare=self.prepare,
            loss=self.loss,
            make_upload=self.upload,
            adjust=self.merge_prototypes if self.prototypes else None,
            trainable=trained_with_keys(self.keys, context),
            private=context.network.head_names(context.trainable) if never else (),
        )
        opening = Exchange("prompts", "none", aggregate=self.reset_prototypes)
        return [opening, *opening_of_keys(self.keys), train]

    def reset_prototypes(
        self, server: Server, uploads: CollectedUploads, context: Context
    ) -> Server:
        """Open the task with Z_G = {}: classes without a prototype are zero and do not count."""
        server = open_task(server, uploads, context)
        empty = no_prototypes(server, context) if self.prototypes else server.state.prototypes
        return replace(server, state=replace(server.state, prototypes=empty))

    def send_prototypes(self, server: Server, context: Context) -> Tree:
        """Send Z_G, with variances only if prototypes are augmented."""
        tensors = server.state.prototypes.tree()
        names = [name for name in tensors if self.augment or name != "variance"]
        return {"prototypes": {name: tensors[name] for name in names}}

    def merge_prototypes(
        self, server: Server, change: Change, uploads: CollectedUploads, context: Context
    ) -> Change:
        """Merge the clients' prototypes (eqs. 14, 15); eqs. 12 and 13 are the default mean."""
        if not uploads.has("prototypes"):
            return change
        mixture = Gaussians.from_sums(uploads.total("prototypes"))
        prototypes = mixture.fill_missing(server.state.prototypes)
        if context.round == context.rounds - 2:  # the last round in which they are sent
            warn_of_missing_classes("pip", context, prototypes.there)
        return replace(change, state=replace(change.state, prototypes=prototypes))

    def prepare(self, client: Client) -> Prepared:
        """Return the client's stored head, the task's slot, and the prototypes to inject."""
        tensors = task_slot(client)
        if self.prototypes:
            shared = client.broadcast["prototypes"]
            tensors |= augment_prototypes(client, shared, self.augment, self.sign == "both")
        has_head = self.average_head == "task_end" and client.state.task == client.context.task
        return Prepared(client.state.head if has_head else {}, tensors)

    def loss(self, step: Step) -> Scalar:
        """Return the loss of eq. 9: prototypes count like rows at the head's input."""
        features, match = prompted_step_features(step)
        joined = step
        if self.prototypes and len(step.tensors["labels"]):  # none in a task's first round
            features, joined = inject_prototypes(features, step)
        ce = joined.mean(joined.cross_entropy(step.classify(features)))
        return Scalar(ce - self.matching * step.mean(match))

    def upload(self, client: Client, local: LocalUpdate) -> ClientResult:
        """Send the update and the classes' moments with weight omega, and count this round."""
        context, trained = client.context, add(client.params, local.update)
        last, rho = context.round == context.rounds - 1, client.state.rho + 1
        omega = rho * len(client.data) / participation_scale(context) if self.weighted else 1.0
        keeps = self.average_head == "task_end"
        head = context.network.head_names(local.update, context.task) if keeps else ()
        sent = {n: value for n, value in local.update.items() if last or n not in head}
        fields = {"update": Sum(sent, omega)}
        if self.prototypes and not last:
            moments = class_moments(client.without_small_classes(), trained)  # eqs. 7 and 8
            fields["prototypes"] = Sum(moments.summands(with_variance=self.augment > 0), omega)
        kept = {name: trained[name] for name in head}
        return ClientResult(fields, PipClientState(rho, context.task if head else -1, kept))


def participation_scale(context: Context) -> int:
    """Return a divisor of omega, so that it does not grow with the rounds beyond a sum's range.

    It is a power of two, the same for all clients, so that no bit of a mean depends on it.
    """
    rounds = context.earlier_rounds + context.round + 1
    return 1 << (rounds.bit_length() - 1)
