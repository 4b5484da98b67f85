"""PIP: prototypes injected into prompt learning.

Ma'sum, Pratama, Ramasamy, Liu, Habibullah, Kowalczyk: PIP: Prototypes-Injected Prompt for Federated
Class Incremental Learning, CIKM 2024 (Algorithm 1).
    for each task:  Z_G = {}
        for each round, a client
            trains prompts and head on its own rows and on the prototypes Z_G and their
                augmentations, which go straight into the head (eqs. 9 to 11);
            computes mean and variance of its head inputs, class by class (eqs. 7 and 8);
            counts this participation: omega_l = rho_l * |T_l|.
        The server takes means weighted by omega: of prompts and head (eqs. 12 and 13), and of the
            classes' first two moments over those who have the class (eqs. 14 and 15).
All that a client sends is a sum with the weight omega_l, which the client knows by itself (but for
a factor that is the same for all).

Where the paper and its code differ, or the paper is silent: all classes of the task are injected,
a client's own too, unweighted; beta is drawn for each coordinate, anew for each local epoch;
rho counts over all tasks so far; the head is averaged in every round; a class that nobody has in a
round keeps its prototype. Prototypes of a task's last round have no reader and are not computed.

The ablation of Table 5, prompts in all cases:
    A    {prototypes: false, weighted: false, head: false}
    B    {weighted: false, head: false}
    C    {prototypes: false, head: false}
    D    {head: false}
    E    {prototypes: false, weighted: false}
    F    {weighted: false}
    G    {prototypes: false}
    PIP  {}
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from perdure.algebra.gaussians import Gaussians, drawn_around
from perdure.federation.messages import Report, Sum
from perdure.methods.base import Batch, Client, Finish, Net, Place, Server
from perdure.methods.parts.prompting import Prompting, dual_prompts, input_prompts
from perdure.models.prompts import Backbone, Pool
from perdure.numbers import Count, Natural
from perdure.trees import Tensors, Tree, add


@dataclass(frozen=True)
class Pip(Prompting):
    """Prompts, shared prototypes and weighted Gaussian aggregation.

    prompt: dualp (prefixes, one expert a task) or l2p (tokens at the input).
    length, pool, general_layers, expert_layers: as in fed-dualp and fed-l2p.
    cache: compute the query of each row once and keep it; false: anew in every step.
    top: prompts that each example gets (l2p).
    lambda: weight of the matching loss; without it 1.0 for dualp and 0.1 for l2p.
    prototypes: inject the classes' prototypes into the loss of the head.
    augment: augmented prototypes for each class (the paper's m); 0: the means alone.
    sign: augment on one side (mu + beta sigma, the paper's) or on both in turn.
    weighted: average by omega, participations times rows; false: the plain mean.
    head: average the head in every round; false: clients keep heads of their own from round to
        round, which are averaged once, at the task's end, for there to be a global model.
    """

    prompt: Literal["dualp", "l2p"] = "dualp"
    general_layers: tuple[Natural, ...] = (0, 1)
    expert_layers: tuple[Natural, ...] = (2, 3, 4)
    top: Count = 5
    lambda_: Annotated[float | None, Field(alias="lambda", ge=0)] = None
    prototypes: bool = True
    augment: Natural = 2
    sign: Literal["plus", "both"] = "plus"
    weighted: bool = True
    head: bool = True

    paper: ClassVar[str] = "Ma'sum et al., CIKM 2024"

    def layout(self, backbone: Backbone, tasks: int) -> Pool:
        """The prompts of L2P or of DualPrompt."""
        if self.prompt == "l2p":
            return input_prompts(self.pool, self.length, self.top)
        return dual_prompts(
            backbone, tasks, self.pool, self.length, self.general_layers, self.expert_layers
        )

    def matching(self) -> float:
        """Lambda, by default the prompts' own."""
        usual = 0.1 if self.prompt == "l2p" else 1.0
        return usual if self.lambda_ is None else self.lambda_

    def refuse(self, config: Any) -> str | None:
        """Weights that are not omega, and clipping of what it sends besides the update."""
        reason, train, clip = super().refuse(config), config.train, config.privacy.clip
        if reason is None and train.weighting is not None:
            reason = (
                f"train.weighting: got {train.weighting!r}, allowed with pip: null, since "
                "method.weighted says how clients weigh"
            )
        if reason is None and clip is not None and self.prototypes:
            reason = (
                "method.prototypes: got True, allowed with privacy.clip: false, since prototypes "
                "are much longer than updates and little of these would be left"
            )
        if reason is None and clip is not None and self.weighted:
            reason = (
                "method.weighted: got True, allowed with privacy.clip: false, since all clients "
                "weigh the same there"
            )
        return reason

    def heaviest(self, rows: int, weighting: str) -> int:
        """Omega, of which scale_of_rounds leaves less than twice the rows."""
        return 2 * rows if self.weighted else 1

    # ---- client

    def starting(self, client: Client) -> Tensors:
        """The client's own head, if heads are not shared and it has one of this task."""
        if self.head or client.kept.get("task") != client.place.task:
            return {}
        head: Tensors = client.kept["head"]
        return head

    def prepare(self, client: Client) -> Tensors:
        """The task's slot, and the prototypes of each epoch with their augmentations."""
        own = super().prepare(client)
        if not self.prototypes:
            return own
        device, shared = client.shard.index.device, client.received["prototypes"]
        shared = {name: value.to(device) for name, value in shared.items()}
        known = Gaussians(**{"variance": torch.zeros_like(shared["mean"]), **shared})
        there, generator = known.there > 0, client.draw("augment")
        epochs = [
            drawn_around(known, self.augment, self.sign == "both", generator)[:, there]
            for _ in range(client.epochs)
        ]
        return own | {
            "points": torch.stack(epochs).flatten(1, 2),
            "labels": outputs_of(client)[there].repeat(1 + self.augment),
        }

    def loss(self, net: Net, params: Tensors, batch: Batch, received: Tree, own: Tensors) -> Tensor:
        """Eq. 9: prototypes join the rows at the head's input, and count like rows."""
        features, match = self.prompted(net, params, batch.x, own["slot"])
        joined = batch
        if self.prototypes and len(own["labels"]):  # none are known in a task's first round
            features, joined = injected(features, batch, own)
        loss = joined.cross_entropy(net.classify(params, features))
        return loss - self.matching() * batch.mean(match)

    def finish(self, client: Client, update: Tensors, buffers: Tensors) -> Finish:
        """Send the update and the classes' moments with the weight omega; count the round."""
        rho = client.kept.get("rho", 0) + 1
        omega = rho * len(client.shard) / scale_of_rounds(client.place) if self.weighted else 1.0
        kept: Tree = {"rho": rho}
        last = client.place.round == client.place.rounds - 1
        upload = {"update": Sum(update, weight=omega)}
        if not self.head:
            head = client.place.network.head_names(update, client.place.task)
            own = {name: client.params[name] + update[name] for name in head}
            kept |= {"task": client.place.task, "head": own}
            sent = {n: value for n, value in update.items() if last or n not in head}
            upload = {"update": Sum(sent, weight=omega)}
        if self.prototypes and not last:
            found = self.moments(client, add(client.params, update))
            upload["prototypes"] = Sum(found.summands(self.augment > 0), weight=omega)
        return Finish(upload, kept)

    def moments(self, client: Client, params: Tensors) -> Gaussians:
        """Eqs. 7 and 8: mean and biased variance of each class's head inputs."""
        slot, rows, labels = super().prepare(client)["slot"], [], []
        with torch.no_grad():
            for batch in client.shard.batches():
                net = client.net().knowing(batch)
                rows.append(self.prompted(net, params, batch.x, slot)[0])
                labels.append(batch.y)
        outputs = outputs_of(client)
        return Gaussians.of(
            torch.cat(rows), torch.searchsorted(outputs, torch.cat(labels)), len(outputs)
        )

    # ---- server

    def begin_task(self, server: Server, place: Place) -> Server:
        """Z_G = {}: prototypes of classes that nobody has reported are zero and do not count."""
        server = super().begin_task(server, place)
        if not self.prototypes:
            return server
        classes = len(place.network.outputs.task_classes[place.task])
        device = next(iter(server.params.values())).device
        none = Gaussians.none(classes, place.network.feature_size, device)
        return replace(server, memory=server.memory | {"prototypes": none.tree()})

    def broadcast(self, server: Server, place: Place) -> Tree:
        """Z_G, with variances where prototypes are augmented."""
        if not self.prototypes:
            return {}
        known = server.memory["prototypes"]
        return {"prototypes": {n: known[n] for n in known if self.augment or n != "variance"}}

    def aggregate(self, server: Server, report: Report, place: Place) -> Server:
        """Eqs. 12 to 15."""
        server = super().aggregate(server, report, place)
        if "prototypes" not in report.totals:
            return server
        before = Gaussians(**server.memory["prototypes"])
        found = Gaussians.merged(report.total("prototypes")).or_else(before)
        return replace(server, memory=server.memory | {"prototypes": found.tree()})


def scale_of_rounds(place: Place) -> int:
    """What omega is divided by for it not to grow with the rounds, beyond what a sum can hold.

    A power of two, the same for all clients: no mean changes by it, not even in its last bit.
    """
    rounds = place.task * place.rounds + place.round + 1
    return 1 << (rounds.bit_length() - 1)


def outputs_of(client: Client) -> Tensor:
    """The outputs that answer for the task's classes, in their order."""
    outputs, task = client.place.network.outputs, client.place.task
    classes = torch.tensor(outputs.task_classes[task])
    return outputs.targets(task)[classes].to(client.shard.index.device)


def injected(features: Tensor, batch: Batch, own: Tensors) -> tuple[Tensor, Batch]:
    """Head inputs and their batch with the epoch's prototypes as further rows."""
    labels = own["labels"]
    points = own["points"][0]
    if batch.epoch is not None:
        points = own["points"].index_select(0, batch.epoch.reshape(1)).squeeze(0)
    mask = batch.mask
    if mask is not None:
        mask = torch.cat([mask, torch.ones_like(labels, dtype=mask.dtype)])
    return torch.cat([features, points]), replace(batch, y=torch.cat([batch.y, labels]), mask=mask)
