"""What Fed-L2P, Fed-DualP and PIP have in common: prompts on a frozen backbone, trained by FedAvg.

Client and server exchange prompts, keys and the head; the backbone is at everybody's from the start
and stays as it is. A client's loss (PIP, eq. 5) is
    L = CE(head(features with prompts), y) - lambda * mean over the batch of cos(query, keys),
cosines summed over the keys of the prompts that the row trains. The outputs of other tasks' classes
do not compete in it. At test a row's own query chooses its prompts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from perdure.errors import UserError, bad_value
from perdure.methods.base import Batch, Client, Method, Net, Place, Server
from perdure.models.network import Network
from perdure.models.passes import Pass
from perdure.models.prompts import Backbone, DualPrompts, Frozen, InputPrompts, Pool, Prompted
from perdure.numbers import Count
from perdure.trees import Tensors, Tree

BACKBONES = ("vit", "text")


@dataclass(frozen=True)
class Prompting(Method):
    """FedAvg of prompts, keys and head; a method says which prompts, and lambda."""

    streams: ClassVar[frozenset[str]] = frozenset({"split", "domains", "permuted"})

    length: Count = 5
    pool: Count = 10
    cache: bool = True

    def layout(self, backbone: Backbone, tasks: int) -> Pool:
        """How prompts meet the backbone."""
        raise NotImplementedError

    def matching(self) -> float:
        """The weight of the matching loss, lambda."""
        raise NotImplementedError

    # ---- before training

    def refuse(self, config: Any) -> str | None:
        """Other streams, models without attention, and decay of prompts that are not trained."""
        reason = super().refuse(config)
        if reason is None and config.model.kind not in BACKBONES:
            allowed = ", ".join(BACKBONES)
            reason = f"model.kind: got {config.model.kind!r}, allowed with prompts: {allowed}"
        longest = config.model.max_tokens
        if reason is None and config.model.kind == "text" and self.length > longest:
            reason = f"method.length: got {self.length}, allowed: 1 to {longest} (model.max_tokens)"
        if reason is None and config.model.train_layers is not None:
            blocks = config.model.train_layers
            reason = (
                f"model.train_layers: got {blocks}, allowed with prompts: null, none is trained"
            )
        if reason is None and config.train.weight_decay:
            decay = config.train.weight_decay
            reason = (
                f"train.weight_decay: got {decay}, allowed with prompts: 0, since it would wear "
                "down what earlier tasks have learned"
            )
        return reason

    def adapt(self, network: Network) -> Network:
        """Prompts on the network's backbone, which is frozen."""
        backbone: Any = network.body
        if isinstance(backbone, Prompted):
            raise UserError("method.with: got two methods with prompts, allowed: one of them")
        longest = getattr(backbone, "tokens", None) or backbone.positions
        if self.length > longest:
            allowed = f"1 to {longest}, the tokens of the backbone's sequence"
            raise bad_value("method.length", self.length, allowed)
        pool = self.layout(backbone, len(network.outputs.task_classes))
        return replace(
            network, body=Prompted(Frozen(backbone, backbone.frozen()), pool, self.cache)
        )

    def loss_outputs(self) -> str:
        """The classes of the task compete, all of them, not only the client's own."""
        return "task"

    def preferred_weighting(self) -> str:
        """The plain mean, as the baselines' pseudocode has it."""
        return "uniform"

    # ---- server

    def start(self, params: Tensors, place: Place) -> Tree:
        """Tasks seen so far."""
        return {"seen": 0}

    def begin_task(self, server: Server, place: Place) -> Server:
        """A new task may take over a prompt from the one before, once."""
        params = body(place.network).prompts.begin_task(server.params, place.task)
        return replace(server, params=params, memory={"seen": place.task + 1})

    # ---- client

    def prepare(self, client: Client) -> Tensors:
        """The task's place in the pool: float [slots]. L2P, whose pool may be smaller, has none."""
        slots, task = body(client.place.network).prompts.slots, client.place.task
        place = torch.tensor(task % slots, device=client.shard.index.device)
        return {"slot": one_hot(place, slots).float()}

    def prompted(self, net: Net, params: Tensors, x: Tensor, slot: Tensor) -> tuple[Tensor, Tensor]:
        """The input of the head, and the cosines of each row's query with the keys it trains."""
        here = body(net.network)
        similarity = here.similarity(params, x, net.run)
        choice = here.prompts.for_training(similarity, slot)
        match = (similarity.unsqueeze(1) * choice).sum((1, 2))
        return here.chosen(params, x, choice, net.run), match

    def loss(self, net: Net, params: Tensors, batch: Batch, received: Tree, own: Tensors) -> Tensor:
        """Eq. 5."""
        features, match = self.prompted(net, params, batch.x, own["slot"])
        logits = net.classify(params, features)
        return batch.cross_entropy(logits) - self.matching() * batch.mean(match)

    # ---- inference

    def export(self, server: Server) -> Tree:
        """Prediction has to know which prompts were trained."""
        return {"seen": server.memory["seen"]}

    def predict(self, server: Server, x: Tensor, network: Network) -> Tensor:
        """Logits with the prompts that each row's query chooses among those of tasks seen."""
        here, run = body(network), Pass()
        choice = here.prompts.for_test(self.among_seen(server, x, network))
        features = here.chosen(server.params, x, choice, run)
        return network.classify(server.params, features, run)

    def among_seen(self, server: Server, x: Tensor, network: Network) -> Tensor:
        """Cosines of each row with each key; out of reach where a slot's task has not come yet."""
        here = body(network)
        similarity = here.similarity(server.params, x, Pass())
        if isinstance(here.prompts, InputPrompts):
            return similarity
        unseen = torch.arange(here.prompts.slots, device=x.device) >= server.memory["seen"]
        return similarity.masked_fill(unseen, -torch.inf)

    def route(self, server: Server, x: Tensor, network: Network) -> Tensor | None:
        """The task whose key is nearest, where a prompt belongs to a task."""
        if isinstance(body(network).prompts, InputPrompts):
            return None
        return self.among_seen(server, x, network).argmax(1)


def body(network: Network) -> Prompted:
    """The prompted body of an adapted network."""
    assert isinstance(network.body, Prompted)
    return network.body


def dual_prompts(
    backbone: Backbone,
    tasks: int,
    pool: int,
    length: int,
    general: tuple[int, ...],
    expert: tuple[int, ...],
) -> DualPrompts:
    """DualPrompt's prompts for a stream: a pool grows to one place a task if it is smaller."""
    depth, twice = backbone.encoder.depth, set(general) & set(expert)
    for name, blocks in (("general_layers", general), ("expert_layers", expert)):
        if any(block >= depth for block in blocks) or len(set(blocks)) < len(blocks):
            allowed = f"numbers from 0 to {depth - 1}, the blocks of the backbone, each once"
            raise bad_value(f"method.{name}", list(blocks), allowed)
    if twice:
        allowed = "blocks that method.general_layers does not name"
        raise bad_value("method.expert_layers", list(expert), allowed)
    return DualPrompts(max(pool, tasks), length, general, expert)


def input_prompts(pool: int, length: int, top: int) -> InputPrompts:
    """L2P's prompts."""
    if top > pool:
        raise bad_value("method.top", top, f"1 to {pool} (method.pool)")
    return InputPrompts(pool, length, top)
