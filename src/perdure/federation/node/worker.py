"""The work of a node: serves requests for its clients, on its data, with the serial engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from perdure.config import EngineConfig, EvaluateConfig, read_saved
from perdure.config.root import PrivacyConfig
from perdure.contract.context import Server
from perdure.core.documents import yaml_value
from perdure.core.errors import RunError, UserError
from perdure.core.received import one_line
from perdure.core.states import partial_from_tree
from perdure.core.trees import Tree, to_device
from perdure.data.streams.stream import Task
from perdure.evaluation.evaluator import MODES, EvaluationCounts, Evaluator
from perdure.federation.evaluation_counts import counts_tree
from perdure.federation.messages import (
    BadMessage,
    NodeRequest,
    RequestBody,
    pack,
    read_body,
    to_bytes,
    to_tensor,
    unpack,
    upload_tree,
)
from perdure.federation.node.data import local_size, local_stream
from perdure.federation.node.policy import (
    NodePolicy,
    check_clients,
    check_current_task,
    check_releases,
    check_survivors,
)
from perdure.federation.node.run import (
    LOG_NAME,
    RUN_NAME,
    Entry,
    NodeRun,
    ReleaseLog,
    SentReplies,
    reply_entry,
    upload_entry,
)
from perdure.federation.node.uploads import ClientExchanges, ClientUpload, ReceivedBroadcast
from perdure.federation.settings import node_count
from perdure.privacy.chain import make_chain
from perdure.training.experiment import Experiment, build_experiment

# ---- What a node makes of a request that it cannot serve: a refusal, whatever the server has sent.

log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")


def refuses_bad_requests(serve: Callable[P, T]) -> Callable[P, T]:
    """Return a function that refuses requests in which a method or a network fails.

    What a broadcast must hold is known to the method alone, which may raise anything. What was
    raised is logged here and not sent, since it may tell about data: `Target 7 is out of bounds`.
    Mistakes of the node's owner, such as files that cannot be read, are raised as they are.
    """

    @wraps(serve)
    def refusing(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return serve(*args, **kwargs)
        except (BadMessage, UserError, OSError):
            raise
        except RunError as error:
            raise BadMessage(one_line(str(error))) from error
        except Exception as error:
            log.warning("a request cannot be served", exc_info=True)
            raise BadMessage("the request cannot be served; the node's log says why") from error

    return refusing


# ---- The work of a node: serves requests for its clients, on its data, with the serial engine
#
# A node does not believe its server. It binds a run to the first config that it was sent, and
# serves requests that belong to this config and to its owner's policy. Everything that leaves is
# logged.

_EXCHANGES = 8
"""Exchanges at the end of a task and the start of the next, for which there is no checkpoint."""


@dataclass(frozen=True)
class Node:
    """A node in one run."""

    number: int
    """Index of the node."""
    nodes: int
    """Number of nodes in the run."""
    run: NodeRun
    """The node's folder for this run."""
    clients: ClientExchanges
    """Runs the node's clients."""
    log: ReleaseLog
    """Says what left the node, in all runs."""
    has_local_data: bool = False
    """Whether the node reads a local data folder, and so serves the current task only."""

    @property
    def experiment(self) -> Experiment:
        """The objects built from the config, with the node's data."""
        return self.clients.experiment

    @refuses_bad_requests
    def serve(self, request: NodeRequest, body: bytes) -> bytes:
        """Serve a request, and return the reply.

        Raises:
            BadMessage: The request is not valid for this node.

        """
        parts = read_body(to_device(unpack(body), self.experiment.device))
        with self.run.serving():
            self._check(request)
            if request.kind in ("train", "exchange"):
                return self._serve_exchange(request, body, parts)
            content = self._answer(request, parts)
            reply = pack(content)
            said = reply_entry(request, content)
            self.log.add([{**self._entry(request), **said, "bytes": len(reply)}])
            return reply

    def _answer(self, request: NodeRequest, parts: RequestBody) -> Tree:
        """Return the reply to a request that is no exchange of the method."""
        if request.kind == "announce":
            return self._start_task(request.position.task)
        if request.kind == "evaluate":
            return {"counts": [counts_tree(c) for c in self._evaluate(request, parts)]}
        if request.kind == "public_keys":
            return self._public_keys(request)
        if request.kind == "reveal":
            return self._answers(request)
        self.run.end(self.clients.policy.keep_state)
        return {}

    def _check(self, request: NodeRequest) -> None:
        """Refuse requests for other clients, or for a task that is not current."""
        request.position.read_again()
        if request.position.task >= self.experiment.task_count:
            raise BadMessage(f"the run has no task {request.position.task + 1}")
        check_clients(request, self.number, self.nodes, self.experiment.config.clients.count)
        if self.has_local_data and request.kind != "end":
            check_current_task(request, self.run.current_task)

    def _start_task(self, task: int) -> Tree:
        """Make a task current if its data can be read.

        It may be a task before the current one: a server may resume from an earlier checkpoint.
        """
        size = local_size(self.experiment, self.number, task)
        self.run.start_task(task)
        return {"size": size}

    def _entry(self, request: NodeRequest) -> Entry:
        """Return what the log says about every reply."""
        at = request.position
        return {
            "run": self.run.folder.name, "kind": request.kind, "task": at.task, "round": at.round,
            "exchange": at.exchange, "attempt": at.attempt,
        }  # fmt: skip

    # ---- secure sums

    def _public_keys(self, request: NodeRequest) -> Tree:
        stores = {client: self.clients.sum_client(request, client) for client in request.clients}
        return {
            "public_keys": {str(c): to_tensor(store.public_key()) for c, store in stores.items()}
        }

    def _answers(self, request: NodeRequest) -> Tree:
        encoded = {int(client): bytes.fromhex(text) for client, text in request.requests.items()}
        wanted = {client: data for client, data in encoded.items() if client in request.clients}
        for data in wanted.values():
            check_survivors(data, self.clients.policy.min_clients)
        answers: Tree = {}
        for client, data in wanted.items():
            answer = self.clients.sum_client(request, client).answer(data)
            answers[str(client)] = to_tensor(answer)
        return {"answers": answers}

    # ---- exchanges

    def _serve_exchange(self, request: NodeRequest, body: bytes, parts: RequestBody) -> bytes:
        """Return the uploads of the node's clients: those sent before, if it is a repetition."""
        sent = SentReplies(self.run.folder / "sent", self.clients.kept_positions + _EXCHANGES)
        received = self.clients.receive(request, parts)
        known, others = sent.get(request, body), sent.others(request, body)
        if known is not None:
            self._remember(request, received, known)
            self.log.add([{**self._entry(request), "bytes": len(known), "repeated": True}])
            return _with_releases(known, request, others + 1)
        check_releases(request, others)
        uploads = [self.clients.run(request, received, number) for number in request.clients]
        reply = pack(self._uploads(uploads))
        is_secret = any(upload.is_secret for upload in uploads)
        counted = _with_releases(reply, request, others + 1) if is_secret else reply
        self.log.add(self._upload_entries(request, uploads, len(counted)))
        if is_secret:
            sent.put(request, body, reply)
            self._remember(request, received, reply)
        return counted

    def _remember(self, request: NodeRequest, received: ReceivedBroadcast, reply: bytes) -> None:
        """Store which masked uploads leave the node, after the reply that holds them."""
        masked = unpack(reply)["masked"] if received.sum_request else {}
        for client, upload in masked.items():
            store = self.clients.sum_client(request, int(client))
            store.remember(received.sum_request, to_bytes(upload) or b"")

    def _uploads(self, uploads: list[ClientUpload]) -> Tree:
        """Return the uploads of the node's clients, masked if the config says so."""
        plain, masked, losses = {}, {}, {}
        for upload in uploads:
            name = str(upload.client.id)
            if self._reports_losses and upload.loss is not None:
                losses[name] = upload.loss
            if upload.sealed is not None:
                masked[name] = to_tensor(upload.sealed)
            else:
                plain[name] = upload_tree(upload.fields)
        return {"uploads": plain, "masked": masked, **({"losses": losses} if losses else {})}

    @property
    def _reports_losses(self) -> bool:
        """Whether training losses are sent, in the clear; not if uploads are masked or noisy."""
        fields = self.clients.policy.fields
        return (fields is None or "losses" in fields) and not self.clients.privacy.hides_losses

    def _upload_entries(
        self, request: NodeRequest, uploads: list[ClientUpload], size: int
    ) -> list[Entry]:
        protection = self.clients.privacy.logged()
        return [
            {
                **self._entry(request), "client": upload.client.id,
                "rows": len(upload.client.data.index), **upload_entry(upload.fields),
                **({"loss": upload.loss} if self._reports_losses else {}),
                **protection, "bytes": size // len(uploads),
            }
            for upload in uploads
        ]  # fmt: skip

    # ---- evaluation

    def _evaluate(self, request: NodeRequest, parts: RequestBody) -> list[EvaluationCounts]:
        experiment, task = self.experiment, request.position.task
        params, buffers, fields = (parts.part(key) for key in ("params", "buffers", "state"))
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


def _with_releases(reply: bytes, request: NodeRequest, releases: int) -> bytes:
    """Return a reply that says how many there were at its place of the run, if more than one."""
    if releases == 1:
        return reply
    return pack({**unpack(reply), "releases": {str(c): releases for c in request.clients}})


def _counts(evaluator: Evaluator, task: Task) -> EvaluationCounts:
    """Return the evaluation counts of a task, or zeros if the node has no rows of it."""
    if any(len(group.index) for group in task.groups):
        return evaluator.counts(task)
    return EvaluationCounts(task.index, dict.fromkeys(MODES, 0.0), 0.0, None)


def make_node(
    run_config: Mapping[str, Any], node_config: Mapping[str, Any], policy: NodePolicy
) -> Node:
    """Return a node in a run.

    Raises:
        BadMessage: The run's name is not valid, the policy refuses the run, it has ended or had
            another config before, or it needs a data folder.

    """
    number, run, text = (
        int(node_config["number"]),
        str(run_config["run"]),
        str(run_config["config"]),
    )
    if not RUN_NAME.fullmatch(run):
        raise BadMessage(f"run: must be 32 hex digits, got {run!r}")
    values, state = yaml_value(text), Path(str(node_config["state"]))
    policy.check_run(read_saved(values))
    config, data = read_saved(values, Path.cwd()), node_config.get("data")
    if config.federation is not None and not data:
        raise BadMessage("the run requires local data on nodes (perdure federation node --data)")
    node_run = NodeRun(state / run)
    node_run.accept(text)
    stream = local_stream(config, Path(str(data)), number) if config.federation else None
    chain = make_chain(config, simulated=False)
    local = {
        "engine": EngineConfig.default(),
        "privacy": PrivacyConfig.whole()(**chain.on_node(policy)),
        "evaluate": EvaluateConfig(),  # the server computes metrics; requests name the counts
    }  # fmt: skip
    experiment = build_experiment(
        config.model_copy(update=local), stream=stream, cache_dir=node_run.folder / "feature_cache"
    )
    exchanges = ClientExchanges(experiment, config, chain, policy, node_run.folder)
    log = ReleaseLog(state.parent / LOG_NAME)
    return Node(number, node_count(config), node_run, exchanges, log, stream is not None)
