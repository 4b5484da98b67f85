"""The engine of a real federation: sends requests to nodes, and checks their replies.

A node can be late, broken or malicious. A client without a valid upload is left out of the round,
with the reason.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from perdure.config import Config
from perdure.contract.context import Client
from perdure.contract.engine import ExchangeResult
from perdure.contract.evaluation import (
    Evaluation,
    EvaluationCounts,
    Evaluator,
    mean_evaluation,
)
from perdure.contract.exchanges import Exchange
from perdure.contract.local_training import LocalTraining, SaveClient
from perdure.contract.upload_collector import (
    FailedUpload,
    MaskedUpload,
    StackedUploads,
    stack_of_one,
)
from perdure.contract.uploads import ClientResult
from perdure.core.errors import RunError
from perdure.core.trees import Tensors, Tree
from perdure.data.source import Array
from perdure.data.streams.stream import Stream, Task
from perdure.flower.evaluation_counts import NeededCounts, ShareOf, evaluation_over_nodes
from perdure.flower.node_replies import (
    ClientUpload,
    Reply,
    Signature,
    decode_reply,
    read_client_bytes,
    read_client_upload,
    read_loss,
    read_node_counts,
    read_size,
    usual_signature,
    with_signature,
)
from perdure.flower.protocol import Kind, NodeRequest, RoundPosition, exchange_body, pack
from perdure.flower.server_stream import node_count, remote_stream
from perdure.runs.model_files import prediction_state

if TYPE_CHECKING:
    from perdure.flower.transport import Transport

log = logging.getLogger(__name__)
_REPLY_MARGIN = 64 << 20
"""Bytes that a reply may have beyond eight times the body of the request."""


class FlowerEngine:
    """Runs client work on the nodes of a federation. Client c is at node c modulo the nodes.

    The engine is also the transport of secure sums (`perdure.privacy.secagg.transport`).
    """

    name = "flower"
    in_process = False

    def __init__(
        self,
        nodes: int,
        transport: Transport | None,
        remote_tests: bool = False,
        share_of: ShareOf = lambda nodes: None,
    ) -> None:
        """Use the nodes behind a transport.

        Args:
            nodes: Number of nodes.
            transport: The way to the nodes. If None, the engine only serves to check a config.
            remote_tests: Whether nodes hold local data, so that they evaluate the model, and the
                current task is announced to them.
            share_of: Returns the largest fraction of all test examples with which a node counts.
        """
        self._share_of = share_of
        self.nodes, self._transport, self._remote_tests = nodes, transport, remote_tests
        self._signatures: dict[tuple[int, int], Signature] = {}
        self._public_keys: tuple[int, dict[int, bytes]] = (-1, {})
        self._sum_request, self._position = b"", RoundPosition(0)
        self._sizes: dict[int, list[int]] = {}
        self._announced_task = -1

    @classmethod
    def from_config(cls, config: Config) -> FlowerEngine:
        """Return an engine without a way to the nodes, to check a config outside a federation."""
        return cls.with_transport(config, None)

    @classmethod
    def with_transport(cls, config: Config, transport: Transport | None) -> FlowerEngine:
        """Return the engine of a config with a way to the nodes."""
        federation = config.federation
        if federation is None:
            return cls(node_count(config), transport)
        return cls(node_count(config), transport, True, federation.share_of)

    @staticmethod
    def launch(*args: Any) -> tuple[dict[str, Any], Path | None]:
        """Run a whole federation as processes of this machine; see `flower.trial.run_trial`."""
        from perdure.flower.trial import run_trial

        return run_trial(*args)

    def stream(self, config: Config) -> Stream | None:
        """Return the stream without its data if nodes hold local data, else None."""
        return remote_stream(config, self.sizes) if config.federation is not None else None

    def choice(self) -> Tree:
        """Return the sizes that nodes reported, for the checkpoint."""
        return {"sizes": {str(task): sizes for task, sizes in self._sizes.items()}}

    def restore(self, choice: Tree) -> None:
        """Restore the sizes, so that nodes need not hold the data of earlier tasks any more."""
        self._sizes = {int(task): list(sizes) for task, sizes in choice.get("sizes", {}).items()}

    def train(
        self, training: LocalTraining, clients: list[Client], keep: SaveClient
    ) -> Iterator[StackedUploads | MaskedUpload | FailedUpload]:
        """Send one request per node, and yield the uploads. Client states stay on the nodes."""
        trained = {name: training.params[name] for name in training.sent}
        model_fields = {"update": trained, "buffers": training.buffers}
        uploads, replies = self._collect("train", clients, model_fields)
        for client in clients:
            upload = uploads[client.id]
            if isinstance(upload, FailedUpload | MaskedUpload):
                yield upload
                continue
            loss = read_loss(replies[client.id % self.nodes], client.id)
            if upload and loss is not None:
                training.losses[client.id] = client.weight, loss
            yield stack_of_one(client.id, client.weight, upload)

    def exchange(
        self, exchange: Exchange, per_client_fields: tuple[str, ...], clients: Iterable[Client]
    ) -> Iterator[tuple[Client, ExchangeResult]]:
        """Send one request per node, and yield each client with its result."""
        members = list(clients)
        uploads = self._collect("exchange", members, {})[0] if members else {}
        for client in members:
            upload = uploads[client.id]
            if isinstance(upload, FailedUpload | MaskedUpload):
                yield client, upload
            else:
                yield client, ClientResult(upload)

    def evaluate(self, evaluators: list[Evaluator], tasks: list[Task]) -> list[Evaluation]:
        """Evaluate on the server's test data, or on that of the nodes, which send counts."""
        if not self._remote_tests:
            return [mean_evaluation(evaluators, task) for task in tasks]
        (evaluator,) = evaluators  # personal models are refused before training
        counts = self._evaluation_counts(evaluator, tasks)
        return [
            evaluation_over_nodes(evaluator, counts, i, task, self._share_of)
            for i, task in enumerate(tasks)
        ]

    def sizes(self, task: int) -> Array:
        """Return how many training examples of a task each node holds: int64 [nodes].

        Nodes are asked once per task. Without a transport every node counts as holding one example,
        so that a config can be checked.
        """
        if self._transport is None:
            return np.ones(self.nodes, dtype=np.int64)
        if task not in self._sizes:
            self._sizes[task] = self._announce_task(task)
        return np.array(self._sizes[task])

    def _announce_task(self, task: int) -> list[int]:
        """Announce the current task to all nodes, and return how many examples each holds."""
        request, self._announced_task = NodeRequest("announce", RoundPosition(task)), task
        replies = self._send(request, {node: [node] for node in range(self.nodes)}, {})
        return [read_size(replies[node]) for node in range(self.nodes)]

    def end_run(self) -> None:
        """Tell all nodes that the run has ended, so that they delete what they stored for it."""
        last = max(self._sizes, default=0)
        request = NodeRequest("end", RoundPosition(last))
        replies = self._send(request, {node: [node] for node in range(self.nodes)}, {})
        for node, reply in replies.items():
            if isinstance(reply, FailedUpload):
                log.warning("node %d was not told that the run has ended: %s", node, reply.reason)

    # ---- transport of secure sums

    def public_keys(self, task: int, clients: list[int]) -> Mapping[int, bytes]:
        """Return the public keys of these clients for a task; each is asked for once."""
        if self._public_keys[0] != task:
            self._public_keys = (task, {})
        known = self._public_keys[1]
        new = [client for client in clients if client not in known]
        if new:
            self._position = RoundPosition(task)
            known |= self._ask_clients(NodeRequest("keys", self._position), new, "keys")
        return {client: known[client] for client in clients if client in known}

    def announce(self, sum_request: bytes) -> None:
        """Set the request that is sent with the next training or exchange."""
        self._sum_request = sum_request

    def ask(self, requests: dict[int, bytes]) -> Mapping[int, bytes]:
        """Send each client its request, and return the answers that arrived."""
        encoded = {str(client): request.hex() for client, request in requests.items()}
        request = NodeRequest("reveal", self._position, requests=encoded)
        return self._ask_clients(request, list(requests), "answers")

    def _ask_clients(self, request: NodeRequest, clients: list[int], key: str) -> dict[int, bytes]:
        """Return the bytes that replies hold for these clients under a key."""
        replies = self._send(request, self._by_node(clients), {})
        values = {c: read_client_bytes(replies[c % self.nodes], key, c) for c in clients}
        return {client: value for client, value in values.items() if value is not None}

    # ---- requests

    def _by_node(self, clients: list[int]) -> dict[int, list[int]]:
        by_node: dict[int, list[int]] = {}
        for client in clients:
            by_node.setdefault(client % self.nodes, []).append(client)
        return by_node

    def _collect(
        self, kind: Kind, clients: list[Client], model_fields: Mapping[str, Tensors]
    ) -> tuple[dict[int, ClientUpload], dict[int, Reply]]:
        """Return the uploads by client, and the replies by node.

        Args:
            kind: What is asked of the clients.
            clients: The clients, all of one exchange.
            model_fields: Tensors of the model, by the field whose form must be theirs.
        """
        first, self._position = clients[0], RoundPosition.of(clients[0].context)
        request = NodeRequest(kind, self._position)
        body = exchange_body(first) | (
            {"call": self._sum_request.hex()} if self._sum_request else {}
        )
        secure, self._sum_request = bool(self._sum_request), b""
        ids = [client.id for client in clients]
        replies = self._send(request, self._by_node(ids), body)
        uploads = {
            c.id: read_client_upload(c, replies[c.id % self.nodes], secure, model_fields)
            for c in clients
        }
        return self._drop_other_forms(uploads), replies

    def _send(
        self, request: NodeRequest, by_node: dict[int, list[int]], body: Tree
    ) -> dict[int, Reply]:
        """Send a request to nodes for their clients, and return the replies by node."""
        if self._transport is None:
            raise RunError("engine.kind: flower requires a federation, see perdure federation")
        task = request.position.task
        is_current = request.kind in ("announce", "end") or task == self._announced_task
        if self._remote_tests and not is_current:
            self._announce_task(task)  # after a restart of the server
        data = pack(body)
        headers = {n: request.for_clients(clients).to_header() for n, clients in by_node.items()}
        limit = 8 * len(data) + _REPLY_MARGIN
        replies = self._transport.send_and_receive(headers, data, limit)
        return {node: decode_reply(node, replies[node]) for node in by_node}

    def _drop_other_forms(self, uploads: dict[int, ClientUpload]) -> dict[int, ClientUpload]:
        """Leave out uploads whose form differs from earlier rounds, or from most others."""
        key = self._position.task, self._position.exchange
        signature = usual_signature(uploads, self._signatures.get(key))
        if signature is None:
            return uploads
        self._signatures[key] = signature
        return {c: with_signature(c, upload, signature) for c, upload in uploads.items()}

    def _evaluation_counts(
        self, evaluator: Evaluator, tasks: list[Task]
    ) -> dict[int, list[EvaluationCounts]]:
        """Return the counts of each node, one per task."""
        server, last_task = evaluator.server, evaluator.last_task
        numbers, position = [task.index for task in tasks], RoundPosition(last_task)
        request = NodeRequest(
            "score", position, tasks=tuple(numbers), evaluates_on=tasks[0].evaluates_on,
            counts=evaluator.needed_counts,
        )  # fmt: skip
        body = {
            "params": server.params,
            "buffers": server.buffers,
            "state": prediction_state(evaluator.method, server.state),
        }
        replies = self._send(request, {node: [node] for node in range(self.nodes)}, body)
        classes = tuple(evaluator.network.outputs.task_classes)
        needed = NeededCounts(evaluator.needed_counts, classes)
        return {
            node: read_node_counts(reply, numbers, last_task, needed)
            for node, reply in replies.items()
        }
