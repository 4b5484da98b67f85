"""The work of a node: serves requests for its clients, on its data, with the serial engine."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from perdure.config import AutoEngineConfig, EvaluateConfig, read_saved
from perdure.contract.context import Client, Context, Server
from perdure.contract.evaluation import MODES, EvaluationCounts, Evaluator
from perdure.contract.local_training import LocalTraining
from perdure.contract.states import partial_from_tree
from perdure.contract.upload_collector import finite_clients, stack_of_one
from perdure.contract.uploads import Upload
from perdure.core.rng import SystemRng
from perdure.core.trees import Tree, to_device
from perdure.data.augment import make_augmentation
from perdure.data.streams.stream import Task
from perdure.engines.in_process import client_work
from perdure.flower.client_states import ClientStateHistory
from perdure.flower.current_task import current_task, start_task
from perdure.flower.evaluation_counts import counts_tree
from perdure.flower.local_work import FinishedWork, train_alone, without_client_axis
from perdure.flower.node_data import local_stream
from perdure.flower.protocol import (
    BadMessage,
    NodeRequest,
    pack,
    to_tensor,
    unpack,
    upload_tree,
)
from perdure.flower.request_checks import check_clients, check_current_task, check_exchange
from perdure.flower.secagg_store import SecAggClientStore
from perdure.flower.secret_draws import SecretDraws, SecretSource
from perdure.flower.server_stream import node_count
from perdure.privacy.policy import PrivacyPolicy
from perdure.training import client_states
from perdure.training.experiment import Experiment, build_experiment
from perdure.training.task_plan import TaskPlan


@dataclass(frozen=True)
class ReceivedBroadcast:
    """What all clients of a request receive, checked."""

    context: Context
    """The position in the run."""
    plan: TaskPlan
    """Exchanges, network and data of the task."""
    server: Server
    """The global model, without server state."""
    broadcast: Tree
    """The method's broadcast, with the global parameters."""


@dataclass(frozen=True)
class Node:
    """A node in one run."""

    number: int
    """Index of the node."""
    nodes: int
    """Number of nodes in the run."""
    experiment: Experiment
    """The objects built from the config, with the node's data."""
    folder: Path
    """Where the node stores the states and secrets of its clients in this run."""
    has_local_data: bool = False
    """Whether the node reads a local data folder, and so serves the current task only."""
    privacy: PrivacyPolicy | None = None
    """Clips uploads and adds noise before they leave the node. If None, nothing is done."""
    make_secret_source: Callable[[], SecretSource | None] = SecretDraws
    """Makes the source of a client's secret draws in an exchange. If it returns None, they derive
    from the run's seed."""
    reports_losses: bool = True
    """Whether training losses are sent, in the clear; not if uploads are masked or noisy."""

    def serve(self, request: NodeRequest, body: bytes) -> bytes:
        """Serve a request, and return the reply.

        Args:
            request: The header of the request.
            body: Its body, from `protocol.pack`.

        Raises:
            BadMessage: The request is not valid for this node.
        """
        tree = to_device(unpack(body), self.experiment.device)
        self._check(request)
        if request.kind == "announce":
            task = request.position.task
            return pack({"train": start_task(self.folder, self.experiment, self.number, task)})
        if request.kind == "score":
            return pack({"counts": [counts_tree(c) for c in self._evaluate(request, tree)]})
        if request.kind == "keys":
            return pack(self._public_keys(request))
        if request.kind == "reveal":
            return pack(self._answers(request))
        return pack(self._uploads(request, tree))

    def _check(self, request: NodeRequest) -> None:
        """Refuse requests for other clients, or for a task that is not current."""
        request.position.check()
        if request.position.task >= self.experiment.task_count:
            raise BadMessage(f"the run has no task {request.position.task + 1}")
        check_clients(request, self.number, self.nodes, self.experiment.config.clients.count)
        if self.has_local_data:
            check_current_task(request, current_task(self.folder))

    # ---- secure sums

    def _public_keys(self, request: NodeRequest) -> Tree:
        stores = {client: self._secagg_client(request, client) for client in request.clients}
        return {"keys": {str(c): to_tensor(store.public_key()) for c, store in stores.items()}}

    def _answers(self, request: NodeRequest) -> Tree:
        encoded = {int(client): text for client, text in request.requests.items()}
        answers = {
            client: self._secagg_client(request, client).answer(bytes.fromhex(text))
            for client, text in encoded.items()
            if client in request.clients
        }
        return {"answers": {str(c): to_tensor(answer) for c, answer in answers.items()}}

    def _secagg_client(self, request: NodeRequest, client: int) -> SecAggClientStore:
        return SecAggClientStore(self.folder / "secure", client, request.position.task)

    # ---- exchanges

    def _uploads(self, request: NodeRequest, tree: Tree) -> Tree:
        """Return the uploads of the node's clients, masked if the body has a sum request."""
        received = self._receive(request, tree)
        uploads: Tree = {}
        masked: Tree = {}
        losses: Tree = {}
        for number in request.clients:
            client, upload, loss = self._work(request, received, number)
            if self.reports_losses and loss is not None:
                losses[str(number)] = loss
            if "call" in tree and upload:
                sum_request = bytes.fromhex(tree["call"])
                secagg_client = self._secagg_client(request, number)
                data = secagg_client.upload(sum_request, upload, client.weight)
                masked[str(number)] = to_tensor(data)
            else:
                uploads[str(number)] = upload_tree(upload)
        return {"uploads": uploads, "sealed": masked, **({"losses": losses} if losses else {})}

    def _receive(self, request: NodeRequest, tree: Tree) -> ReceivedBroadcast:
        """Return the content of a request; BadMessage if the run has no such exchange."""
        position, experiment = request.position, self.experiment
        params, buffers, fields = (_entry(tree, key) for key in ("params", "buffers", "broadcast"))
        plan = experiment.plan_task(position.task, params, position.clients_with_data)
        check_exchange(request, plan.exchanges, plan.rounds)
        context = replace(
            plan.context, round=position.round, rounds=position.rounds, lr=float(position.lr),
            exchange=position.exchange, attempt=position.attempt,
        )  # fmt: skip
        server = Server(params, buffers, experiment.method.ServerState())
        return ReceivedBroadcast(context, plan, server, {"params": params, **fields})

    def _work(
        self, request: NodeRequest, received: ReceivedBroadcast, number: int
    ) -> tuple[Client, Upload, float | None]:
        """Run one client's work, store its state, and return its protected upload and its loss."""
        runs, method = self.experiment.config.runs, self.experiment.method
        history = ClientStateHistory(self.folder, runs.checkpoint_every * runs.keep_checkpoints + 2)
        sequence_number = request.position.sequence_number
        stored = history.get(number, sequence_number)
        client = self._client(received, number, stored)
        work = self._run(received, client)
        result, private = work.result, work.private
        # as in the loop, a client whose upload is not finite keeps its previous state
        if (result.state is not None or private) and _all_finite(result.fields):
            tree = client_states.to_stored_tree(stored, result.state, private, method)
            history.put(number, sequence_number, tree)
        return client, self._protect(client, result.fields, request.sampled), work.loss

    def _client(self, received: ReceivedBroadcast, number: int, stored: Tree) -> Client:
        tree = to_device(stored, self.experiment.device)
        state, private = client_states.from_stored_tree(tree, self.experiment.method)
        plan, context, server = received.plan, received.context, received.server
        client = self.experiment.make_client(
            plan, number, context, server, received.broadcast, state, private
        )
        return replace(client, secret_source=self.make_secret_source())

    def _run(self, received: ReceivedBroadcast, client: Client) -> FinishedWork:
        """Run one client's work in the exchange."""
        fields, position = self.experiment.method.needs.per_client_fields, client.context.exchange
        if position:
            return FinishedWork(client_work(received.plan.exchanges.at(position), fields, client))
        server = received.server
        training = LocalTraining(
            received.plan.exchanges.train, client.context,
            self.experiment.config_at(client.context.task).train,
            server.params, server.buffers, received.broadcast, fields,
            augmentation=make_augmentation(self.experiment.config.data),
        )  # fmt: skip
        return train_alone(training, client)

    def _protect(self, client: Client, upload: Upload, sampled: int) -> Upload:
        """Clip an upload and add noise that no other machine can repeat, if the config says so."""
        if self.privacy is None or not upload:
            return upload
        stacked = stack_of_one(client.id, client.weight, upload)
        context = replace(client.context, rng=SystemRng())
        protected = self.privacy.protect(stacked, context, sampled)
        return {name: without_client_axis(field) for name, field in protected.fields.items()}

    # ---- evaluation

    def _evaluate(self, request: NodeRequest, tree: Tree) -> list[EvaluationCounts]:
        experiment, task = self.experiment, request.position.task
        params, buffers, fields = (_entry(tree, key) for key in ("params", "buffers", "state"))
        state = partial_from_tree(experiment.method.ServerState, fields, "server state")
        server = Server(params, buffers, state)
        evaluator = Evaluator(
            experiment.method, server, experiment.network_at(task), task,
            metric_counts=request.counts,
        )  # fmt: skip
        tasks = [experiment.task(number) for number in request.tasks]
        if request.evaluates_on == "validation":
            tasks = [task.on_validation() for task in tasks]
        return [_counts(evaluator, task) for task in tasks]


def _entry(tree: Tree, key: str) -> Tree:
    """Return an entry of a request's body."""
    entry = tree.get(key)
    if not isinstance(entry, dict):
        raise BadMessage(f"the request has no {key}")
    return entry


def _counts(evaluator: Evaluator, task: Task) -> EvaluationCounts:
    """Return the evaluation counts of a task, or zeros if the node has no rows of it."""
    if any(len(group.index) for group in task.groups):
        return evaluator.counts(task)
    return EvaluationCounts(task.index, dict.fromkeys(MODES, 0.0), 0.0, None)


def _all_finite(upload: Upload) -> bool:
    return all(finite_clients(stack_of_one(0, 1.0, upload)))


def make_node(run_config: Mapping[str, Any], node_config: Mapping[str, Any]) -> Node:
    """Return a node in a run.

    Args:
        run_config: Settings of the submitted app: "run" and "config".
        node_config: Settings of the node: "number", "state" and, with local data, "data".

    Raises:
        BadMessage: The run's name is not valid, or the run needs a data folder.
    """
    config = read_saved(yaml.safe_load(str(run_config["config"])), Path.cwd())
    number, run = int(node_config["number"]), str(run_config["run"])
    if not re.fullmatch(r"[0-9a-f]{32}", run):
        raise BadMessage(f"run: must be 32 hex digits, got {run!r}")
    folder = Path(str(node_config["state"])) / run
    data = node_config.get("data")
    if config.federation is not None and not data:
        raise BadMessage("the run requires local data on nodes (perdure federation node --data)")
    stream = local_stream(config, Path(str(data)), number) if config.federation else None
    local = {
        "engine": AutoEngineConfig(), "privacy": type(config.privacy)(),
        "evaluate": EvaluateConfig(),  # the server computes metrics; requests name the counts
    }  # fmt: skip
    experiment = build_experiment(
        config.model_copy(update=local), stream=stream, cache_dir=folder / "known"
    )
    privacy = PrivacyPolicy(config) if config.privacy.clip is not None else None
    return Node(
        number, node_count(config), experiment, folder, stream is not None, privacy,
        reports_losses=privacy is None and not config.privacy.secagg,
    )  # fmt: skip
