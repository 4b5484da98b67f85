"""What a node does with an order: the work of its clients, on its data, with the serial engine."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from perdure.config import AutoEngineConfig, read_saved
from perdure.contract.context import Client, Context, Server
from perdure.contract.evaluation import MODES, EvaluationCounts, Evaluator
from perdure.contract.exchanges import TaskExchanges
from perdure.contract.local_training import LocalTraining
from perdure.contract.states import partial_from_tree
from perdure.contract.upload_collector import finite_clients, stack_of_one
from perdure.contract.uploads import ClientResult, Field, Upload
from perdure.core.rng import SystemRng, system_generator
from perdure.core.trees import Tensors, Tree, to_device
from perdure.data.streams.stream import Task
from perdure.engines.in_process import client_work
from perdure.engines.serial import SerialEngine
from perdure.flower.client_states import ClientStateHistory
from perdure.flower.node_data import local_stream
from perdure.flower.protocol import (
    BadMessage,
    NodeRequest,
    count_tree,
    pack,
    to_tensor,
    unpack,
    upload_tree,
)
from perdure.flower.secagg_store import SecAggClientStore
from perdure.flower.server_stream import node_count
from perdure.privacy.policy import PrivacyPolicy
from perdure.training import client_states
from perdure.training.experiment import Experiment, build_experiment
from perdure.training.task_plan import TaskPlan

log = logging.getLogger(__name__)
SecretSource = Callable[[str], torch.Generator]


class Secrets:
    """One client's secret draws in one exchange: nobody who knows the run's seed can repeat them.

    As with `Client.draw`, a purpose that is asked for twice has the same draws.
    """

    def __init__(self) -> None:
        self._states: dict[str, Tensor] = {}

    def __call__(self, purpose: str) -> torch.Generator:
        """A generator for a purpose."""
        if purpose not in self._states:
            self._states[purpose] = system_generator().get_state()
        generator = torch.Generator()
        generator.set_state(self._states[purpose])
        return generator


@dataclass(frozen=True)
class Received:
    """What all clients of an order receive, checked."""

    context: Context
    plan: TaskPlan
    server: Server
    broadcast: Tree


@dataclass(frozen=True)
class Node:
    """A node in one run: its part of the experiment, and where it keeps its clients' states."""

    number: int
    nodes: int
    experiment: Experiment
    folder: Path
    """The node's own, for this run."""
    own_data: bool = False
    privacy: PrivacyPolicy | None = None
    """Clipping and noise before anything leaves the node."""
    secrets: Callable[[], SecretSource | None] = Secrets
    """Makes the source of a client's secret draws in an exchange; None: the run's seed."""

    def serve(self, order: NodeRequest, body: bytes) -> bytes:
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

    def _check(self, order: NodeRequest) -> None:
        """Serve one's own clients, and the task that is current: never a later one."""
        order.spot.check()
        if order.spot.task >= self.experiment.task_count:
            raise BadMessage(f"task {order.spot.task + 1} is not of this run")
        count = self.experiment.config.clients.count
        if order.spot.clients > count:
            raise BadMessage(f"{order.spot.clients} clients with data, the run has {count}")
        for client in order.clients:
            if not 0 <= client < count or client % self.nodes != self.number:
                raise BadMessage(f"client {client} is not at node {self.number}")
        if self.own_data:
            self._check_current(order)

    def _check_current(self, order: NodeRequest) -> None:
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
        return {"train": int(self.experiment.task(task).partition.sizes[self.number])}

    def _secrets(self, order: NodeRequest) -> Tree:
        if order.kind == "keys":
            keys = {str(c): self._masks(order, c).public() for c in order.clients}
            return {"keys": {client: to_tensor(key) for client, key in keys.items()}}
        asked = {int(c): bytes.fromhex(text) for c, text in order.requests.items()}
        mine = {c: text for c, text in asked.items() if c in order.clients}
        return {
            "answers": {str(c): to_tensor(self._masks(order, c).answer(t)) for c, t in mine.items()}
        }

    def _masks(self, order: NodeRequest, client: int) -> SecAggClientStore:
        return SecAggClientStore(self.folder / "secure", client, order.spot.task)

    def _uploads(self, order: NodeRequest, tree: Tree) -> Tree:
        """What the node's clients send: open, or masked where the order brings a call."""
        received = self._received(order, tree)
        uploads: Tree = {}
        sealed: Tree = {}
        for number in order.clients:
            client, upload = self._work(order, received, number)
            if "call" in tree and upload:
                call = bytes.fromhex(tree["call"])
                data = self._masks(order, number).upload(call, upload, client.weight)
                sealed[str(number)] = to_tensor(data)
            else:
                uploads[str(number)] = upload_tree(upload)
        return {"uploads": uploads, "sealed": sealed}

    def _received(self, order: NodeRequest, tree: Tree) -> Received:
        """What the order says and brings; BadMessage if the run is never there."""
        spot, experiment = order.spot, self.experiment
        params, buffers, fields = (_part(tree, name) for name in ("params", "buffers", "broadcast"))
        plan = experiment.plan_task(spot.task, params, spot.clients)
        _check_step(order, plan.exchanges, plan.rounds)
        context = replace(
            plan.context, round=spot.round, rounds=spot.rounds, lr=float(spot.lr),
            exchange=spot.exchange, attempt=spot.attempt,
        )  # fmt: skip
        server = Server(params, buffers, experiment.method.ServerState())
        return Received(context, plan, server, {"params": params, **fields})

    def _work(self, order: NodeRequest, received: Received, number: int) -> tuple[Client, Upload]:
        config, method = self.experiment.config.runs, self.experiment.method
        versions = ClientStateHistory(
            self.folder, config.checkpoint_every * config.keep_checkpoints + 2
        )
        position = order.spot.position
        kept = versions.get(number, position)
        client = self._client(received, number, kept)
        done, private = self._done(received, client)
        # who sends something not finite goes on with what it had before, as in the loop
        if (done.state is not None or private) and _all_finite(done.fields):
            tree = client_states.to_stored_tree(kept, done.state, private, method)
            versions.put(number, position, tree)
        return client, self._protected(client, done.fields, order.sampled)

    def _client(self, received: Received, number: int, kept: Tree) -> Client:
        tree = to_device(kept, self.experiment.device)
        state, private = client_states.from_stored_tree(tree, self.experiment.method)
        plan, context, server = received.plan, received.context, received.server
        client = self.experiment.make_client(
            plan, number, context, server, received.broadcast, state, private
        )
        return replace(client, secret_source=self.secrets())

    def _done(self, received: Received, client: Client) -> tuple[ClientResult, Tensors]:
        """What a client sends and its new state, and its private parameters."""
        fields, position = self.experiment.method.needs.per_client_fields, client.context.exchange
        if position:
            return client_work(received.plan.exchanges.at(position), fields, client), {}
        server = received.server
        work = LocalTraining(
            received.plan.exchanges.train, client.context, self.experiment.config.train,
            server.params, server.buffers, received.broadcast, fields,
        )  # fmt: skip
        return _trained(work, client)

    def _protected(self, client: Client, upload: Upload, sampled: int) -> Upload:
        """Clipped and with noise, where the config says so; the noise is nobody else's to know."""
        if self.privacy is None or not upload:
            return upload
        answers = stack_of_one(client.id, client.weight, upload)
        context = replace(client.context, rng=SystemRng())
        sent = self.privacy.protect(answers, context, sampled)
        return {name: _alone(part) for name, part in sent.fields.items()}

    def _counts(self, order: NodeRequest, tree: Tree) -> list[EvaluationCounts]:
        experiment, task = self.experiment, order.spot.task
        params, buffers, fields = (_part(tree, name) for name in ("params", "buffers", "state"))
        state = partial_from_tree(experiment.method.ServerState, fields, "server state")
        server = Server(params, buffers, state)
        evaluator = Evaluator(experiment.method, server, experiment.network_at(task), task)
        return [_counted(evaluator, experiment.task(number)) for number in order.tasks]


def _part(tree: Tree, name: str) -> Tree:
    """A part of an order's body."""
    part = tree.get(name)
    if not isinstance(part, dict):
        raise BadMessage(f"an order without {name}")
    return part


def _check_step(order: NodeRequest, exchanges: TaskExchanges, rounds: int) -> None:
    """Refuse rounds and exchanges that the method does not declare for the task."""
    spot = order.spot
    if spot.rounds != rounds or not _is_held(order, exchanges, rounds):
        raise BadMessage(
            f"{order.kind} {spot.exchange} at round {spot.round} of {spot.rounds} is no part of "
            f"task {spot.task + 1}"
        )


def _is_held(order: NodeRequest, exchanges: TaskExchanges, rounds: int) -> bool:
    spot = order.spot
    if order.kind == "train":
        return spot.exchange == 0 and spot.round < rounds
    try:
        exchange = exchanges.at(spot.exchange)
    except IndexError:
        return False
    return exchange.participants != "none" and spot.round == (rounds if spot.exchange > 0 else 0)


def _trained(work: LocalTraining, client: Client) -> tuple[ClientResult, Tensors]:
    kept: dict[int, tuple[Any, Tensors]] = {}

    def keep(number: int, state: Any, private: Tensors) -> None:
        kept[number] = (state, private)

    (answers,) = SerialEngine().train(work, [client], keep)
    state, private = kept.get(client.id, (None, {}))
    fields = {name: _alone(part) for name, part in answers.fields.items()}
    return ClientResult(fields, state), private


def _counted(evaluator: Evaluator, task: Task) -> EvaluationCounts:
    """A node without test data of a task adds nothing."""
    if any(len(group.index) for group in task.groups):
        return evaluator.counts(task)
    return EvaluationCounts(task.index, dict.fromkeys(MODES, 0.0), 0.0, None)


def _alone(part: Field) -> Field:
    """A field of a stack of one client, without the client axis."""
    value = {name: tensor[0] for name, tensor in part.value.items()}
    return replace(part, value=value)


def _all_finite(upload: Upload) -> bool:
    return all(finite_clients(stack_of_one(0, 1.0, upload)))


def make_node(run_config: Mapping[str, Any], node_config: Mapping[str, Any]) -> Node:
    """A node in a run, from what the run's app and the node's own settings say."""
    config = read_saved(yaml.safe_load(str(run_config["config"])), Path.cwd())
    number, run = int(node_config["number"]), str(run_config["run"])
    if not re.fullmatch(r"[0-9a-f]{32}", run):
        raise BadMessage(f"the run's name {run!r} is none")
    folder = Path(str(node_config["state"])) / run
    data = node_config.get("data")
    if config.federation is not None and not data:
        raise BadMessage("the run requires local data on nodes (perdure federation node --data)")
    own = local_stream(config, Path(str(data)), number) if config.federation else None
    plain = {"engine": AutoEngineConfig(), "privacy": type(config.privacy)()}
    experiment = build_experiment(
        config.model_copy(update=plain), stream=own, cache_dir=folder / "known"
    )
    privacy = PrivacyPolicy(config) if config.privacy.clip is not None else None
    return Node(number, node_count(config), experiment, folder, own is not None, privacy)
