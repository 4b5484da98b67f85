"""What a node does with an order: the work of its clients, on its data, with the serial engine."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from perdure.config import EngineConfig, parse
from perdure.data.tasks import Task
from perdure.engines.flower.agreed import node_count
from perdure.engines.flower.local import local_stream
from perdure.engines.flower.masks import Masks
from perdure.engines.flower.versions import Versions
from perdure.engines.flower.wire import (
    BadMessage,
    Order,
    Spot,
    count_tree,
    pack,
    to_tensor,
    unpack,
    upload_tree,
)
from perdure.engines.serial import SerialEngine
from perdure.engines.work import Job
from perdure.federation.evaluation import MODES, Count, Judge
from perdure.federation.experiment import Experiment, prepare
from perdure.federation.messages import Field, Upload, finite, single
from perdure.methods.base import Client, Finish, Place, Server
from perdure.privacy.policy import Privacy
from perdure.rng import Draws
from perdure.trees import Tree, to_device

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Node:
    """A node in one run: its part of the experiment, and where it keeps its clients' states."""

    number: int
    nodes: int
    experiment: Experiment
    folder: Path
    """The node's own, for this run."""
    own_data: bool = False
    privacy: Privacy | None = None
    """Clipping and noise before anything leaves the node."""

    def serve(self, order: Order, body: bytes) -> bytes:
        """The reply to an order; BadMessage if it is none for this node."""
        tree = to_device(unpack(body), self.experiment.device)
        self._check(order)
        if order.kind == "announce":
            return pack(self._announced(order.spot.task))
        if order.kind == "score":
            return pack({"counts": [count_tree(c) for c in self._counts(order, tree)]})
        if order.kind in ("keys", "reveal"):
            return pack(self._secrets(order))
        return pack(self._uploads(order, tree))

    def _check(self, order: Order) -> None:
        """Serve one's own clients, and the task that is current: never a later one."""
        spot = order.spot
        known = order.kind == "keys" or spot.tasks == self.experiment.tasks
        if not known or not 0 <= spot.task < self.experiment.tasks:
            raise BadMessage(f"task {spot.task + 1} of {spot.tasks}: not of this run")
        for client in order.clients:
            if client % self.nodes != self.number:
                raise BadMessage(f"client {client} is not at node {self.number}")
        if self.own_data:
            self._check_current(order)

    def _check_current(self, order: Order) -> None:
        current, task = self._current(), order.spot.task
        if order.kind == "announce" and task > current + 1:
            raise BadMessage(f"task {task + 1} was announced after task {current + 1}")
        if order.kind != "announce" and task != current:
            raise BadMessage(f"task {task + 1} is not current, task {current + 1} is")
        if any(not 0 <= number <= current for number in order.tasks):
            raise BadMessage(f"a test on tasks after task {current + 1}")

    def _current(self) -> int:
        path = self.folder / "task"
        return int(path.read_text(encoding="ascii")) if path.is_file() else -1

    def _announced(self, task: int) -> Tree:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "task").write_text(str(task), encoding="ascii")
        return {"train": int(self.experiment.task(task).shares.sizes[self.number])}

    def _secrets(self, order: Order) -> Tree:
        if order.kind == "keys":
            keys = {str(c): self._masks(order, c).public() for c in order.clients}
            return {"keys": {client: to_tensor(key) for client, key in keys.items()}}
        asked = {int(c): bytes.fromhex(text) for c, text in order.requests.items()}
        mine = {c: text for c, text in asked.items() if c in order.clients}
        return {
            "answers": {str(c): to_tensor(self._masks(order, c).answer(t)) for c, t in mine.items()}
        }

    def _masks(self, order: Order, client: int) -> Masks:
        return Masks(self.folder / "secure", client, order.spot.task)

    def _uploads(self, order: Order, tree: Tree) -> Tree:
        """What the node's clients send: open, or masked where the order brings a call."""
        uploads: Tree = {}
        sealed: Tree = {}
        for number in order.clients:
            client, upload = self._work(order, tree, number)
            if "call" in tree and upload:
                call = bytes.fromhex(tree["call"])
                data = self._masks(order, number).upload(call, upload, client.weight)
                sealed[str(number)] = to_tensor(data)
            else:
                uploads[str(number)] = upload_tree(upload)
        return {"uploads": uploads, "sealed": sealed}

    def _work(self, order: Order, tree: Tree, number: int) -> tuple[Client, Upload]:
        config = self.experiment.config.runs
        versions = Versions(self.folder, config.checkpoint_every * config.keep + 2)
        position = order.spot.position(order.kind)
        client = self._client(order.spot, tree, number, versions.get(number, position))
        done = self._train(client) if order.kind == "train" else self._extract(client)
        # who sends something not finite goes on with what it had before, as in the loop
        if done.kept is not None and _all_finite(done.upload):
            versions.put(number, position, done.kept)
        return client, self._protected(client, done.upload, order.sampled)

    def _protected(self, client: Client, upload: Upload, sampled: int) -> Upload:
        """Clipped and with noise, where the config says so; the noise is nobody else's to know."""
        if self.privacy is None or not upload:
            return upload
        secret = Draws(int.from_bytes(os.urandom(16), "little"))
        answers = single(client.id, client.weight, upload)
        sent = self.privacy.sent(answers, replace(client.place, draws=secret), sampled)
        return {name: _alone(part) for name, part in sent.fields.items()}

    def _client(self, spot: Spot, tree: Tree, number: int, kept: Tree) -> Client:
        place, server = self._place(spot), Server(tree["params"], tree["buffers"])
        received = {"params": server.params, **tree["received"]}
        client = self.experiment.client(number, place, server, received)
        return replace(client, kept=to_device(kept, self.experiment.device))

    def _place(self, spot: Spot) -> Place:
        experiment = self.experiment
        return Place(
            experiment.network, experiment.draws, spot.task, spot.tasks, spot.round, spot.rounds,
            spot.lr, spot.clients, extra=spot.extra, attempt=spot.attempt,
        )  # fmt: skip

    def _train(self, client: Client) -> Finish:
        method, train = self.experiment.method, self.experiment.config.train
        job = Job(method, client.place, train, client.params, client.buffers, client.received)
        kept: dict[int, Tree] = {}
        (answers,) = SerialEngine().train(job, [client], kept.__setitem__)
        upload = {name: _alone(part) for name, part in answers.fields.items()}
        return Finish(upload, kept.get(client.id))

    def _extract(self, client: Client) -> Finish:
        return self.experiment.method.extract(client)

    def _counts(self, order: Order, tree: Tree) -> list[Count]:
        server = Server(tree["params"], tree["buffers"], tree["memory"])
        judge = Judge(self.experiment.method, server, self.experiment.network, order.spot.task)
        return [_counted(judge, self.experiment.task(task)) for task in order.tasks]


def _counted(judge: Judge, task: Task) -> Count:
    """A node without test data of a task adds nothing."""
    if any(len(group.index) for group in task.groups):
        return judge.count(task)
    return Count(task.index, dict.fromkeys(MODES, 0.0), 0.0, None)


def _alone(part: Field) -> Field:
    """A field of a stack of one client, without the client axis."""
    value = {name: tensor[0] for name, tensor in part.value.items()}
    return replace(part, value=value)


def _all_finite(upload: Upload) -> bool:
    return all(finite(single(0, 1.0, upload)))


def make_node(run_config: Mapping[str, Any], node_config: Mapping[str, Any]) -> Node:
    """A node in a run, from what the run's app and the node's own settings say."""
    config = parse(yaml.safe_load(str(run_config["config"])))
    number, run = int(node_config["number"]), str(run_config["run"])
    if not re.fullmatch(r"[0-9a-f]{32}", run):
        raise BadMessage(f"the run's name {run!r} is none")
    folder = Path(str(node_config["state"])) / run
    data = node_config.get("data")
    if config.federation is not None and not data:
        raise BadMessage("the run needs nodes with data of their own (perdure node --data)")
    own = local_stream(config, Path(str(data)), number) if config.federation else None
    plain = {"engine": EngineConfig(), "privacy": type(config.privacy)()}
    experiment = prepare(config.model_copy(update=plain), stream=own, known=folder / "known")
    privacy = Privacy(config) if config.privacy.clip is not None else None
    return Node(number, node_count(config), experiment, folder, own is not None, privacy)
