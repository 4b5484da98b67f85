"""STAMP: gradients aligned over a client's tasks and over clients, from a prototypical coreset.

Exploiting Client Heterogeneity for Forgetting Mitigation in Federated Continual Learning: A
Spatio-Temporal Gradient Alignment Approach (STAMP), 2025. In a round, client u

    trains E epochs from theta to theta_u^E, on cross-entropy and a prototypical network's loss (7),
    takes d^t = theta_u^E - theta for the current task and, for each earlier task i, the negative
        gradient d^i at theta_u^E of the loss of the task's prototypes (3), as long as d^t,
    sends eta GA(d^1 .. d^t),

and the server applies GA to what the clients sent (4). At a task's end each client puts `budget`
examples of each class, whose mean feature is the class's, into its memory (5); a class whose memory
is full takes on the style of new examples instead (6). Nothing but the update is ever sent.

Each part has a switch: spatial is (1) of the paper's Table 2, temporal is (2), and (3) is
`selection: herding, gradients: prototype, protonet: add` against `random, sample, none`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from perdure.algebra.alignment import (
    Alignment,
    Normalize,
    Rescale,
    Scope,
    SearchSettings,
    Solver,
    align,
    cosines,
    gram_matrices,
)
from perdure.algebra.prototypes import prototypical_loss
from perdure.contract import (
    Change,
    Client,
    ClientResult,
    CollectedUploads,
    Context,
    Each,
    Exchange,
    LocalUpdate,
    Method,
    Needs,
    Scalar,
    Server,
    Step,
    Sum,
    Train,
    stacked,
)
from perdure.contract.step import Batch, cross_entropy_rows, masked_mean
from perdure.core.trees import Tensors, Tree
from perdure.methods.parts.alignment import (
    AlignmentRecord,
    Conflicts,
    align_updates,
    client_conflicts,
)
from perdure.methods.parts.coreset_memory import (
    CoresetMemory,
    CoresetSelector,
    Selection,
    StackedCoresets,
    coreset_active_outputs,
    group_by_past_tasks,
    stack_coresets,
)
from perdure.models.forward_pass import ForwardPass
from perdure.models.network import Network

Gradients = Literal["prototype", "sample"]
ProtoNet = Literal["none", "add", "encoder"]
_SERVER_SEARCH = SearchSettings()
_CLIENT_SEARCH = SearchSettings(momentum=0.1, steps=25)
"""Searches for Gamma in STAMP's published code."""


@dataclass(frozen=True)
class Stamp(Method):
    """FedOMG's server, clients that align their tasks, and a prototypical coreset."""

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
    """Record the cosines between clients' updates and between each client's tasks."""
    spatial: bool = True
    """The server aligns updates. If false, it averages them and needs only the sum."""
    temporal: bool = True
    """Clients align the gradients of their tasks."""
    eta: Annotated[float, Field(gt=0)] = 2.0
    """Step of the clients' alignment, as published."""
    client_kappa: Annotated[float, Field(ge=0)] | None = None
    """Search radius on clients. Default: `kappa`."""
    budget: Annotated[int, Field(ge=1)] = 20
    """Examples per class that a client stores (|M^l|)."""
    selection: Selection = "herding"
    """Choice of stored examples: herding (well posed), literal (eq. 5 as printed) or random."""
    mixstyle: bool = True
    """Apply eq. 6 to a class that comes again when its memory is full. If false, the class's budget
    is divided over its tasks."""
    gradients: Gradients = "prototype"
    """Gradient of an earlier task: from prototypes, through the body (eq. 3), or from every stored
    example."""
    protonet: ProtoNet = "add"
    """eq. 7: added to the cross-entropy (add), alone for the body with the cross-entropy for the
    head (encoder, as in the published code), or none."""
    protonet_weight: Annotated[float, Field(gt=0)] = 0.1
    """Weight of eq. 7 with `protonet: add`."""

    paper: ClassVar[str] = "STAMP, 2025"
    ServerState: ClassVar[type] = AlignmentRecord
    ClientState: ClassVar[type] = CoresetMemory

    @property
    def needs(self) -> Needs:
        """The server sees single updates if it aligns them."""
        return Needs(per_client_fields=("update",) if self.spatial else ())

    def check_config(self, config: Any) -> str | None:
        """Refuse to mix the styles of words."""
        if config.model.kind == "text" and self.temporal and self.mixstyle:
            return "method.mixstyle: must be false with model.kind text, got True"
        return None

    @property
    def alignment(self) -> Alignment:
        """How the server aligns: every update as long as their mean."""
        normalize: Normalize = "mean" if self.normalize else "none"
        return Alignment(
            self.kappa, normalize, self.rescale, self.solver, self.scope, _SERVER_SEARCH
        )

    @property
    def client_alignment(self) -> Alignment:
        """How a client aligns its tasks: every direction as long as the current task's."""
        kappa = self.kappa if self.client_kappa is None else self.client_kappa
        normalize: Normalize = "last" if self.normalize else "none"
        return Alignment(kappa, normalize, self.rescale, self.solver, self.scope, _CLIENT_SEARCH)

    def exchanges(self, context: Context) -> list[Exchange | Train]:
        """Train with aligned gradients; then every client updates its coreset alone."""
        aligns_tasks = self.temporal and context.task > 0
        train = Train(
            loss=self.head_loss if self.protonet == "encoder" else None,
            penalty=None if self.protonet == "none" else self.prototypical_loss,
            make_upload=self.align_tasks if aligns_tasks or self.diagnostics_ else None,
            combine=self.align_clients if self.spatial else None,
            adjust=self.record if self.diagnostics_ else None,
            per_client_updates=self.spatial,
        )
        coreset = Exchange("coreset", client_work=self.update_coreset)
        return [train, coreset] if self.temporal else [train]

    # ---- client

    def prototypical_loss(self, step: Step) -> Scalar:
        """Return eq. 7, over all rows of the step.

        It is no mean over rows: a row that is alone in its class does not count.
        """
        outputs = step.logits().shape[1]
        loss = prototypical_loss(step.features(), step.batch.y, step.batch.mask, outputs)
        return Scalar(self.protonet_weight * loss)

    def head_loss(self, step: Step) -> Tensor:
        """Return a cross-entropy that trains the head alone."""
        return step.cross_entropy(step.classify(step.features().detach()))

    @stacked
    def align_tasks(self, clients: list[Client], local: LocalUpdate) -> ClientResult:
        """Send eta GA(d^1 .. d^t) of each client; without a past d^t as it is."""
        update = {name: value.clone() for name, value in local.update.items()}
        numbers = next(iter(update.values())).new_zeros(len(clients), 3)
        for rows in group_by_past_tasks(clients):
            today = {name: value[rows] for name, value in update.items()}
            directions = self.directions([clients[row] for row in rows], today)
            for name, value in self._aligned(directions, today).items():
                update[name][rows] = value
            if self.diagnostics_:
                numbers[rows] = pair_statistics(directions).to(numbers)
        fields = {"update": Each(update) if self.spatial else Sum(update)}
        return ClientResult(fields | self._diagnostic_fields(numbers))

    def directions(self, clients: list[Client], today: Tensors) -> Tensors:
        """Return d^1 .. d^t of clients with equally many past tasks, [clients, t, values]."""
        past = stack_coresets(clients)
        descents = past_task_steps(clients, today, past, self.gradients)
        return {
            name: torch.cat([descents[name].flatten(2), value.flatten(1).unsqueeze(1)], 1)
            for name, value in today.items()
        }

    def _aligned(self, directions: Tensors, today: Tensors) -> Tensors:
        """Return eta GA(d^1 .. d^t).

        A tensor that is not finite stays as it is, so that the server leaves this client out.
        """
        found = align(directions, self.client_alignment)
        return {
            name: torch.where(_finite(value), self.eta * found[name].view_as(value), value)
            for name, value in today.items()
        }

    def _diagnostic_fields(self, numbers: Tensor) -> dict[str, Sum]:
        if not self.diagnostics_:
            return {}
        names = ("cosine", "conflicts", "pairs")
        return {"conflicts": Sum(dict(zip(names, numbers.unbind(1), strict=True)), weight=1.0)}

    def update_coreset(self, client: Client) -> ClientResult:
        """Put examples of the task that ends into the memory (eqs. 5 and 6); send nothing."""
        selector = CoresetSelector(self.budget, self.selection, self.mixstyle)
        return ClientResult(state=selector.after_task(client))

    # ---- server

    def align_clients(self, server: Server, uploads: CollectedUploads, context: Context) -> Tensors:
        """Return GA of the clients' updates (eq. 4)."""
        return align_updates(uploads, self.alignment)

    def record(
        self, server: Server, change: Change, uploads: CollectedUploads, context: Context
    ) -> Change:
        """Record how clients and tasks agree; the change itself stays as it is."""
        clients = client_conflicts(uploads) if self.spatial else None
        return replace(change, state=AlignmentRecord(clients, task_conflicts(uploads)))

    def diagnostics(self, server: Server, context: Context) -> Tree:
        """Return what the last round recorded."""
        record: AlignmentRecord = server.state
        return record.tree()


@dataclass(frozen=True)
class CoresetLoss:
    """Eq. 3's loss of one past task: mean over classes c of CE(f(p_c), c), p_c the mean feature.

    Or, with `sample`, the mean over all stored examples. Pure, as a method's loss.
    """

    network: Network
    fwd: ForwardPass
    gradients: Gradients

    def __call__(
        self, params: Tensors, x: Tensor, y: Tensor, count: Tensor, active: Tensor | None = None
    ) -> Tensor:
        """Return the loss of x [classes, examples, ...]; of each class `count` are no padding."""
        real = (torch.arange(x.shape[1], device=x.device) < count.unsqueeze(1)).to(x.dtype)
        features = self.network.features(params, x.flatten(0, 1), self.fwd)
        if self.gradients == "sample":
            targets, weight = y.repeat_interleave(x.shape[1]), real.flatten()
        else:
            sums = (features.view(*real.shape, -1) * real.unsqueeze(2)).sum(1)
            features = sums / count.clamp(min=1).unsqueeze(1)
            targets, weight = y, (count > 0).to(x.dtype)
        logits = self.network.classify(params, features, self.fwd)
        return masked_mean(cross_entropy_rows(logits, Batch(x, targets, weight, active)), weight)


def past_task_steps(
    clients: list[Client], update: Tensors, past: StackedCoresets, gradients: Gradients
) -> Tensors:
    """Return minus lr times the past tasks' gradients at theta_u^E, [clients, tasks, ...].

    All clients and tasks go through one vectorized pass.
    """
    client, lead, active = clients[0], past.y.shape[:2], coreset_active_outputs(clients, past)
    fwd = ForwardPass(buffers=client.buffers, stacked=True)
    task_loss = CoresetLoss(client.context.network, fwd, gradients)
    leaves = {
        name: (client.params[name] + value).repeat_interleave(lead[1], 0).requires_grad_()
        for name, value in update.items()
    }

    def loss(params: Tensors, *arguments: Tensor) -> Tensor:
        return task_loss(client.params | params, *arguments)

    arguments = [past.x, past.y, past.count, *([] if active is None else [active])]
    with torch.enable_grad():
        losses = torch.vmap(loss)(leaves, *(value.flatten(0, 1) for value in arguments))
    grads = torch.autograd.grad(losses.sum(), list(leaves.values()), materialize_grads=True)
    return {
        name: g.view(*lead, *g.shape[1:]) * -client.context.lr
        for name, g in zip(leaves, grads, strict=True)
    }


def pair_statistics(directions: Tensors) -> Tensor:
    """Return sum of cosines, conflicts and number of pairs of each client's tasks, [clients, 3]."""
    found = torch.from_numpy(cosines(gram_matrices(directions).sum(0)))
    pairs = torch.full((len(found),), float(found.shape[1]))
    return torch.stack([found.sum(1), (found < 0).sum(1), pairs], 1)


def task_conflicts(uploads: CollectedUploads) -> Conflicts:
    """Return how the tasks of the same client agree, over the pairs of all clients."""
    sums = {name: float(value) for name, value in uploads.total("conflicts").items()}
    pairs = sums["pairs"]  # none at the first task
    return Conflicts(sums["cosine"] / pairs, sums["conflicts"] / pairs) if pairs else Conflicts()


def _finite(stack: Tensor) -> Tensor:
    """Return which rows of a stack are finite, in a shape that broadcasts to it."""
    return torch.isfinite(stack.flatten(1).sum(1)).view(-1, *[1] * (stack.dim() - 1))
