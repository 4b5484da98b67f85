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

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from perdure.algebra.alignment import CLIENT, SERVER, Alignment, Recipe, align, cosines, grams
from perdure.algebra.prototypes import prototypical
from perdure.federation.messages import Field as Part
from perdure.federation.messages import Report, Sum, Upload
from perdure.methods.base import Batch, Client, Finish, Method, Net, Place, Server, default_upload
from perdure.methods.coreset_memory import Keeper, Past, Selection, past_tasks, stack_past
from perdure.methods.fedomg import FedOmg, visible
from perdure.models.passes import Pass
from perdure.trees import Tensors, Tree

Gradients = Literal["prototype", "sample"]
ProtoNet = Literal["none", "add", "encoder"]


@dataclass(frozen=True)
class Stamp(FedOmg):
    """FedOMG's server, clients that align their own tasks, and a prototypical coreset.

    spatial: the server aligns (else it averages, and needs only the sum).
    temporal: clients align; eta: their step, as published.
    client_kappa: the search radius on clients; without it, kappa.
    budget: examples of a class that a client keeps (|M^l|).
    selection: herding (well posed), literal (eq. 5 by the letter), random.
    mixstyle: eq. 6 for a class that comes again when its memory is full; off: the class's budget is
        divided over its tasks.
    gradients: of a task from prototypes, with gradients through the body (eq. 3), or from every
        stored example.
    protonet: eq. 7 added to the cross-entropy with weight protonet_weight; or alone for the body,
        with the cross-entropy for the head (encoder, as the published code has it); or none.
    """

    spatial: bool = True
    temporal: bool = True
    eta: Annotated[float, Field(gt=0)] = 2.0
    client_kappa: Annotated[float, Field(ge=0)] | None = None
    budget: Annotated[int, Field(ge=1)] = 20
    selection: Selection = "herding"
    mixstyle: bool = True
    gradients: Gradients = "prototype"
    protonet: ProtoNet = "add"
    protonet_weight: Annotated[float, Field(gt=0)] = 0.1

    paper: ClassVar[str] = "STAMP, 2025"
    recipe: ClassVar[Recipe] = SERVER

    def has_own(self, name: str) -> bool:
        """A part that is switched off leaves its functions to others."""
        switched = {"combine": self.spatial, "loss": self.protonet != "none"}
        return switched.get(name, True) and super().has_own(name)

    def refuse(self, config: Any) -> str | None:
        """Styles are mixed of images and other numbers, not of words."""
        reason = super().refuse(config)
        if reason is None and config.model.kind == "text" and self.temporal and self.mixstyle:
            reason = "method.mixstyle: got True, allowed with model.kind text: false"
        return reason

    @property
    def client_alignment(self) -> Alignment:
        """How a client aligns its tasks: every direction as long as the current task's."""
        kappa = self.kappa if self.client_kappa is None else self.client_kappa
        normalize: Literal["last", "none"] = "last" if self.normalize else "none"
        return Alignment(kappa, normalize, self.rescale, self.solver, self.scope, CLIENT)

    # ---- server

    def combine(self, report: Report, server: Server, place: Place) -> Tensors:
        """GA of the clients' updates, or their mean."""
        if self.spatial:
            return super().combine(report, server, place)
        return Method.combine(self, report, server, place)

    def shown_fields(self) -> tuple[str, ...]:
        """The updates, where the server aligns them."""
        return super().shown_fields() if self.spatial else ()

    def consolidates(self, place: Place) -> bool:
        """Memories are updated at a task's end, if a task follows that needs them."""
        return self.temporal and place.task < place.tasks - 1

    def consolidates_alone(self) -> bool:
        """Nothing travels for it."""
        return True

    def _seen(self, report: Report) -> Tree:
        seen = super()._seen(report) if self.spatial else {}
        if "conflicts" in report.totals:
            sums = {name: float(value) for name, value in report.total("conflicts").items()}
            pairs = sums.pop("pairs")  # none at the first task
            seen["tasks"] = {name: value / pairs if pairs else None for name, value in sums.items()}
        return seen

    # ---- client

    def loss(self, net: Net, params: Tensors, batch: Batch, received: Tree, own: Tensors) -> Tensor:
        """Cross-entropy and, where it is on, the prototypical network's loss."""
        if self.protonet == "none":
            return super().loss(net, params, batch, received, own)
        features = net.features(params, batch.x)
        near = self.protonet_weight * prototypical(features, batch.y, batch.mask, _outputs(net))
        given = features.detach() if self.protonet == "encoder" else features
        return batch.cross_entropy(net.classify(params, given)) + near

    def finish(self, client: Client, update: Tensors, buffers: Tensors) -> Finish:
        """The aligned update of one client."""
        upload = self.finish_all([client], _alone(update), _alone(buffers))
        return Finish({name: _first(part) for name, part in upload.items()})

    def finish_all(self, clients: list[Client], update: Tensors, buffers: Tensors) -> Upload:
        """Send eta GA(d^1 .. d^t) of each client; at its first task d^t as it is."""
        seen = update[next(iter(update))].new_zeros(len(clients), 3)
        if self.temporal and clients[0].place.task:
            update = {name: value.clone() for name, value in update.items()}
            for rows in by_past(clients):
                self._align_tasks([clients[row] for row in rows], rows, update, seen)
        upload = visible(update, buffers) if self.spatial else default_upload(update, buffers)
        if not self.diagnostics:
            return upload
        numbers = dict(zip(("cosine", "conflicts", "pairs"), seen.unbind(1), strict=True))
        return {**upload, "conflicts": Sum(numbers, weight=1.0)}

    def _align_tasks(
        self, clients: list[Client], rows: list[int], update: Tensors, seen: Tensor
    ) -> None:
        """Align the tasks of clients that have as many past ones; writes their rows."""
        today = {name: value[rows] for name, value in update.items()}
        past = stack_past([past_tasks(client) for client in clients])
        descents = self.descents(clients[0], today, past, competing(clients, past))
        directions = {
            name: torch.cat([descents[name].flatten(2), value.flatten(1).unsqueeze(1)], 1)
            for name, value in today.items()
        }
        for name, aligned in align(directions, self.client_alignment).items():
            good = torch.isfinite(today[name].flatten(1).sum(1))
            good = good.view(-1, *[1] * (today[name].dim() - 1))
            # what is not finite goes as it is, so that the server leaves this client out by name
            update[name][rows] = torch.where(
                good, self.eta * aligned.view_as(today[name]), today[name]
            )
        if self.diagnostics:
            seen[rows] = _sums(directions).to(seen)

    def descents(
        self, client: Client, update: Tensors, past: Past, allowed: Tensor | None
    ) -> Tensors:
        """Minus lr times the past tasks' gradients at theta_u^E, [clients, tasks, ...].

        All clients and tasks in one lifted pass, each with weights of its own.
        """
        count, tasks = past.y.shape[:2]
        leaves = {
            name: (client.params[name] + value).repeat_interleave(tasks, 0).requires_grad_()
            for name, value in update.items()
        }
        fixed = {name: value for name, value in client.params.items() if name not in update}
        net = Net(client.place.network, Pass(buffers=client.buffers, lifted=True))
        masks = () if allowed is None else (allowed.flatten(0, 1),)

        def loss(params: Tensors, x: Tensor, y: Tensor, n: Tensor, *mask: Tensor) -> Tensor:
            return memory_loss(net, {**fixed, **params}, x, y, n, self.gradients, *mask)

        examples = (past.x.flatten(0, 1), past.y.flatten(0, 1), past.count.flatten(0, 1))
        with torch.enable_grad():
            losses = torch.vmap(loss)(leaves, *examples, *masks)
        grads = torch.autograd.grad(losses.sum(), list(leaves.values()), materialize_grads=True)
        step = -client.place.lr
        return {
            name: g.view(count, tasks, *g.shape[1:]) * step
            for name, g in zip(leaves, grads, strict=True)
        }

    def extract(self, client: Client) -> Finish:
        """Update the memory; nothing is sent."""
        return Finish({}, Keeper(self.budget, self.selection, self.mixstyle).after_task(client))


def by_past(clients: list[Client]) -> list[list[int]]:
    """Places of the clients, in groups with equally many past tasks; those without are left out."""
    groups: dict[int, list[int]] = defaultdict(list)
    for place, client in enumerate(clients):
        groups[len(past_tasks(client))].append(place)
    return [rows for tasks, rows in sorted(groups.items()) if tasks]


def competing(clients: list[Client], past: Past) -> Tensor | None:
    """For each past task the outputs that compete in its loss, bool [clients, tasks, outputs].

    As in training: all of them (None), those seen so far, or those of the task alone.
    """
    masks = [client.shard.allowed for client in clients]
    if masks[0] is None:
        return None
    today = torch.stack([mask for mask in masks if mask is not None]).unsqueeze(1)
    own = torch.zeros(*past.y.shape[:2], today.shape[-1], dtype=torch.bool, device=today.device)
    for place in range(past.y.shape[2]):
        there = past.count[..., place : place + 1] > 0
        own |= torch.zeros_like(own).scatter(2, past.y[..., place : place + 1], there)
    inside = (own & ~today).any(2, keepdim=True).logical_not()
    return torch.where(inside, today, own)


def memory_loss(
    net: Net,
    params: Tensors,
    x: Tensor,
    y: Tensor,
    count: Tensor,
    gradients: Gradients,
    allowed: Tensor | None = None,
) -> Tensor:
    """Eq. 3's loss of one past task: mean over classes c of CE(f(p_c), c), p_c the mean feature.

    x: [classes, examples, ...], the first `count` of each class are real; or, with `sample`, the
    mean over all stored examples. Pure, as a method's loss.
    """
    there = (torch.arange(x.shape[1], device=x.device) < count.unsqueeze(1)).to(x.dtype)
    features = net.features(params, x.flatten(0, 1))
    if gradients == "sample":
        logits, targets = net.classify(params, features), y.repeat_interleave(x.shape[1])
        weight = there.flatten()
    else:
        sums = (features.view(*there.shape, -1) * there.unsqueeze(2)).sum(1)
        logits = net.classify(params, sums / count.clamp(min=1).unsqueeze(1))
        targets, weight = y, (count > 0).to(x.dtype)
    return Batch(x, targets, weight, allowed).cross_entropy(logits)


def _outputs(net: Net) -> int:
    outputs = net.network.outputs
    return outputs.count(len(outputs.task_classes) - 1)


def _sums(directions: Tensors) -> Tensor:
    """Sum of cosines, number of conflicts and number of pairs of a client's tasks, [clients, 3]."""
    found = torch.from_numpy(cosines(grams(directions).sum(0)))
    pairs = torch.full((len(found),), float(found.shape[1]))
    return torch.stack([found.sum(1), (found < 0).sum(1), pairs], 1)


def _alone(value: Tensors) -> Tensors:
    return {name: tensor.unsqueeze(0) for name, tensor in value.items()}


def _first(part: Part) -> Part:
    """One client's part of a stack of one."""
    return replace(part, value={name: value[0] for name, value in part.value.items()})
