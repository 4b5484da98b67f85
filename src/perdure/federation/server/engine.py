"""The engine of a real federation: sends requests to nodes, and checks their replies.

A node can be late, broken or malicious. A client without a valid upload is left out of the round,
with the reason.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from perdure.config import Config, FederationConfig
from perdure.contract.context import Client
from perdure.contract.exchanges import Exchange
from perdure.contract.uploads import (
    ClientResult,
    FailedUpload,
    MaskedUpload,
    StackedUploads,
    stack_of_one,
)
from perdure.core.errors import RunError
from perdure.core.trees import Tensors, Tree
from perdure.data.examples import Array
from perdure.data.streams.stream import Stream, Task
from perdure.evaluation.evaluator import Evaluation, Evaluator, mean_evaluation
from perdure.federation.evaluation_counts import evaluation_over_nodes
from perdure.federation.messages import Kind, NodeRequest, RoundPosition, exchange_body, pack
from perdure.federation.server.replies import (
    ClientUpload,
    ExtraReleases,
    Reply,
    UploadForms,
    ask_until_quorum,
    counts_of_nodes,
    decode_reply,
    read_client_bytes,
    read_client_upload,
    read_loss,
)
from perdure.federation.server.stream import Announcements, remote_stream
from perdure.federation.settings import node_count
from perdure.training.engines.engine import ExchangeResult
from perdure.training.local_training import LocalTraining, SaveClient

if TYPE_CHECKING:
    from perdure.federation.server.transport import Transport

log = logging.getLogger(__name__)
_REPLY_MARGIN = 64 << 20
"""Bytes that a reply may have beyond eight times the body of the request."""


class FlowerEngine:
    """Runs client work on the nodes of a federation. Client c is at node c modulo the nodes.

    The engine is also the transport of secure sums (`perdure.privacy.secagg.journal`).
    """

    name = "flower"
    in_process = False

    def __init__(
        self, nodes: int, transport: Transport | None, federation: FederationConfig | None = None
    ) -> None:
        """Use the nodes behind a transport."""
        self.nodes, self._transport, self._federation = nodes, transport, federation
        self._forms = UploadForms()
        self._public_keys: tuple[int, dict[int, bytes]] = (-1, {})
        self._sum_request, self._position = b"", RoundPosition(0)
        self._releases = ExtraReleases()
        self._announcements: Announcements | None = None
        if federation is not None:
            self._announcements = Announcements(nodes, federation, self._announce)

    @classmethod
    def with_transport(cls, config: Config, transport: Transport | None) -> FlowerEngine:
        """Return the engine of a config with a way to the nodes."""
        return cls(node_count(config), transport, config.federation)

    def stream(self, config: Config) -> Stream | None:
        """Return the stream without its data if nodes hold local data, else None."""
        return remote_stream(config, self.sizes) if config.federation is not None else None

    def choice(self) -> Tree:
        """Return the sizes and the repeated uploads that nodes reported, for the checkpoint."""
        sizes = self._announcements.to_tree() if self._announcements else {}
        return {"sizes": sizes, "releases": self._releases.to_tree()}

    def restore(self, choice: Tree) -> None:
        """Restore what nodes reported before a restart."""
        self._releases.restore(choice["releases"])
        if self._announcements is not None:
            self._announcements.restore(choice["sizes"])

    def train(
        self, training: LocalTraining, clients: list[Client], keep: SaveClient
    ) -> Iterator[StackedUploads | MaskedUpload | FailedUpload]:
        """Send one request per node, and yield the uploads. Client states stay on the nodes."""
        yield from self._not_reached(training.context.task)
        trained = {name: training.params[name] for name in training.sent}
        model_fields = {"update": trained, "buffers": training.buffers}
        uploads, replies = self._collect("train", clients, model_fields)
        for client in clients:
            upload = uploads[client.id]
            if isinstance(upload, FailedUpload | MaskedUpload):
                yield upload
                continue
            if not upload:
                yield FailedUpload(client.id, "it has too few rows to send anything", True)
                continue
            loss = read_loss(replies[client.id % self.nodes], client.id)
            if loss is not None:
                training.losses[client.id] = client.weight, loss
            yield stack_of_one(client.id, client.weight, upload)

    def exchange(
        self, exchange: Exchange, per_client_fields: tuple[str, ...], clients: Iterable[Client]
    ) -> Iterator[tuple[Client, ExchangeResult]]:
        """Send one request per node, and yield each client with its result."""
        members = list(clients)
        if members:
            for failure in self._not_reached(members[0].context.task):
                yield members[0], failure  # a client of this round, in place of one that it lacks
        uploads = self._collect("exchange", members, {})[0] if members else {}
        for client in members:
            upload = uploads[client.id]
            if isinstance(upload, FailedUpload | MaskedUpload):
                yield client, upload
            else:
                yield client, ClientResult(upload)

    def evaluate(self, evaluators: list[Evaluator], tasks: list[Task]) -> list[Evaluation]:
        """Evaluate on the server's test data, or on that of the nodes, which send counts."""
        if self._federation is None:
            return [mean_evaluation(evaluators, task) for task in tasks]
        (evaluator,) = evaluators  # personal models are refused before training
        counts = counts_of_nodes(self._send, self._federation, self.nodes, evaluator, tasks)
        share_of = self._federation.share_of
        return [
            evaluation_over_nodes(evaluator, counts, i, task, share_of)
            for i, task in enumerate(tasks)
        ]

    def sizes(self, task: int) -> Array:
        """Return how many training examples of a task each node holds: int64 [nodes].

        Nodes are asked once per task. Without a transport every node counts as holding one example,
        so that a config can be checked.
        """
        if self._transport is None or self._announcements is None:
            return np.ones(self.nodes, dtype=np.int64)
        return self._announcements.sizes(task)

    def _announce(self, request: NodeRequest, nodes: list[int]) -> dict[int, Reply]:
        return self._deliver(request, {node: [node] for node in nodes}, {})

    def _not_reached(self, task: int) -> list[FailedUpload]:
        return self._announcements.not_reached(task) if self._announcements is not None else []

    def end_run(self) -> None:
        """Tell all nodes that the run has ended, so that they delete what they stored for it."""
        request = NodeRequest("end", RoundPosition(0))
        replies = self._deliver(request, {node: [node] for node in range(self.nodes)}, {})
        for node, reply in replies.items():
            if isinstance(reply, FailedUpload):
                log.warning("node %d does not confirm the end of the run: %s", node, reply.reason)

    # ---- transport of secure sums

    def public_keys(self, task: int, clients: list[int]) -> Mapping[int, bytes]:
        """Return the public keys of these clients for a task; each is asked for once."""
        if self._public_keys[0] != task:
            self._public_keys = (task, {})
        known = self._public_keys[1]
        new = [client for client in clients if client not in known]
        if new:
            self._position = RoundPosition(task)
            known |= self._ask_clients(
                NodeRequest("public_keys", self._position), new, "public_keys"
            )
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
        by_node, found = self._by_node(clients), dict[int, bytes]()

        def ask(nodes: list[int]) -> dict[int, str]:
            replies = self._send(request, {node: by_node[node] for node in nodes}, {})
            for node, reply in replies.items():
                values = {c: read_client_bytes(reply, key, c) for c in by_node[node]}
                found.update({c: value for c, value in values.items() if value is not None})
            lacking = {node for node in nodes if not found.keys() >= set(by_node[node])}
            return {node: _reason(replies[node], f"its reply has no {key}") for node in lacking}

        ask_until_quorum(self._federation, list(by_node), ask)
        return found

    # ---- requests

    def _by_node(self, clients: list[int]) -> dict[int, list[int]]:
        by_node: dict[int, list[int]] = {}
        for client in clients:
            by_node.setdefault(client % self.nodes, []).append(client)
        return by_node

    def _collect(
        self, kind: Kind, clients: list[Client], model_fields: Mapping[str, Tensors]
    ) -> tuple[dict[int, ClientUpload], dict[int, Reply]]:
        """Return the uploads by client, and the replies by node."""
        first, self._position = clients[0], RoundPosition.of(clients[0].context)
        place = self._position.task, self._position.exchange
        request = NodeRequest(kind, self._position)
        body = exchange_body(first)
        if self._sum_request:
            body["sum_request"] = self._sum_request.hex()
        secure, self._sum_request = bool(self._sum_request), b""
        by_node = self._by_node([client.id for client in clients])
        replies: dict[int, Reply] = {}
        uploads: dict[int, ClientUpload] = {}

        def ask(nodes: list[int]) -> dict[int, str]:
            replies.update(self._send(request, {node: by_node[node] for node in nodes}, body))
            read = {
                c.id: read_client_upload(c, replies[c.id % self.nodes], secure, model_fields)
                for c in clients
            }
            uploads.update(self._forms.drop_others(place, read))
            failed = (each for each in uploads.values() if isinstance(each, FailedUpload))
            return {each.client % self.nodes: each.reason for each in failed}

        ask_until_quorum(self._federation, list(by_node), ask)
        self._releases.note(replies, by_node)
        return uploads, replies

    def _send(
        self, request: NodeRequest, by_node: dict[int, list[int]], body: Tree
    ) -> dict[int, Reply]:
        """Send a request to nodes for their clients, and return the replies by node."""
        behind: Mapping[int, FailedUpload] = {}
        if self._announcements is not None:
            behind = self._announcements.catch_up(request.position.task, list(by_node))
        ready = {node: clients for node, clients in by_node.items() if node not in behind}
        return {**behind, **(self._deliver(request, ready, body) if ready else {})}

    def _deliver(
        self, request: NodeRequest, by_node: dict[int, list[int]], body: Tree
    ) -> dict[int, Reply]:
        """Send a request to nodes, whatever task they serve; else as `_send`."""
        if self._transport is None:
            raise RunError("engine.kind: flower requires a federation, see perdure federation")
        data = pack(body)
        headers = {n: request.for_clients(clients).to_header() for n, clients in by_node.items()}
        limit = 8 * len(data) + _REPLY_MARGIN
        replies = self._transport.send_and_receive(headers, data, limit)
        return {node: decode_reply(node, replies[node]) for node in by_node}


def _reason(reply: Reply, otherwise: str) -> str:
    return reply.reason if isinstance(reply, FailedUpload) else otherwise
