"""The engine of a real federation: it sends orders to nodes and checks what comes back.

A node can be late, broken or malicious. What it sends is decoded without pickle, and names, shapes
and types must be those of the model and of the other clients' answers; whoever answers with
something else is left out of the round, by name and with the reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from perdure.config import Config
from perdure.contract.context import Client
from perdure.contract.engine import ExchangeResult
from perdure.contract.evaluation import Evaluation, EvaluationCounts, Evaluator, mean_evaluation
from perdure.contract.exchanges import Exchange
from perdure.contract.local_training import LocalTraining, SaveClient
from perdure.contract.upload_collector import (
    FailedUpload,
    MaskedUpload,
    StackedUploads,
    stack_of_one,
)
from perdure.contract.uploads import ClientResult, Each, Upload
from perdure.core.errors import RunError
from perdure.core.trees import Tensors, Tree
from perdure.data.source import Array
from perdure.data.streams.stream import Stream, Task
from perdure.flower.protocol import (
    BadMessage,
    Kind,
    NodeRequest,
    RoundPosition,
    pack,
    read_count,
    read_upload,
    to_bytes,
    unpack,
)
from perdure.flower.server_stream import node_count, remote_stream
from perdure.runs.trained_model import prediction_state

Signature = tuple[tuple[str, ...], ...]
_ROOM = 64 << 20
"""Bytes that a reply may have beyond eight times what was sent."""


class Transport(Protocol):
    """The way to the nodes."""

    def send_and_receive(
        self, heads: Mapping[int, str], body: bytes, limit: int
    ) -> dict[int, bytes | FailedUpload]:
        """Send each node its head and all the same body; the replies by node.

        A node that does not answer in time, or with more bytes than `limit`, has a Failure.
        """
        ...


class FlowerEngine:
    """Client work by the nodes of a federation. Client c is at node c modulo the nodes."""

    name = "flower"
    in_process = False

    def __init__(self, nodes: int, link: Transport | None, remote_tests: bool = False) -> None:
        self.nodes, self._link, self._remote_tests = nodes, link, remote_tests
        self._known: dict[tuple[int, int], Signature] = {}
        self._keys: tuple[int, dict[int, bytes]] = (-1, {})
        self._call, self._spot = b"", RoundPosition(0)
        self._sizes: dict[int, list[int]] = {}
        self._announced = -1

    @classmethod
    def from_config(cls, config: Config) -> FlowerEngine:
        """For a config that is looked at outside a federation: there is no way to any node."""
        return cls(node_count(config), None, config.federation is not None)

    @staticmethod
    def launch(*args: Any) -> tuple[dict[str, Any], Path | None]:
        """Run a whole federation as processes of this machine (`flower.trial.run_trial`)."""
        from perdure.flower.trial import run_trial

        return run_trial(*args)

    def stream(self, config: Config) -> Stream | None:
        """The stream without its data, where nodes have data of their own."""
        return remote_stream(config, self.sizes) if config.federation is not None else None

    def choice(self) -> Tree:
        """The sizes that nodes have told; which engine a node uses is the config's to say."""
        return {"sizes": {str(task): sizes for task, sizes in self._sizes.items()}}

    def restore(self, choice: Tree) -> None:
        """Take up the sizes: nodes need not hold the data of earlier tasks any more."""
        self._sizes = {int(task): list(sizes) for task, sizes in choice.get("sizes", {}).items()}

    def train(
        self, training: LocalTraining, clients: list[Client], keep: SaveClient
    ) -> Iterator[StackedUploads | MaskedUpload | FailedUpload]:
        """One order a node; what clients keep stays on their node."""
        trained = {name: training.params[name] for name in training.sent}
        found = self._work("train", clients, {"update": trained, "buffers": training.buffers})
        for client in clients:
            done = found[client.id]
            if isinstance(done, FailedUpload | MaskedUpload):
                yield done
            else:
                yield stack_of_one(client.id, client.weight, done)

    def exchange(
        self, exchange: Exchange, per_client_fields: tuple[str, ...], clients: Iterable[Client]
    ) -> Iterator[tuple[Client, ExchangeResult]]:
        """One order a node."""
        members = list(clients)
        found = self._work("exchange", members, {}) if members else {}
        for client in members:
            done = found[client.id]
            yield (
                client,
                done if isinstance(done, FailedUpload | MaskedUpload) else ClientResult(done),
            )

    def evaluate(self, evaluators: list[Evaluator], tasks: list[Task]) -> list[Evaluation]:
        """On the server's own test data, or on that of the nodes, which send sums."""
        if not self._remote_tests:
            return [mean_evaluation(evaluators, task) for task in tasks]
        (evaluator,) = evaluators  # personal models are refused before training
        counts = self._counts(evaluator, [task.index for task in tasks])
        return [_scores(counts, place, task) for place, task in enumerate(tasks)]

    def sizes(self, task: int) -> Array:
        """How many training rows of a task each node holds, asked once.

        Without a way to them as if each held one, so that a config can be checked.
        """
        if self._link is None:
            return np.ones(self.nodes, dtype=np.int64)
        if task not in self._sizes:
            self._sizes[task] = self._announce_task(task)
        return np.array(self._sizes[task])

    def _announce_task(self, task: int) -> list[int]:
        """Tell all nodes which task is current; they tell how many rows of it they hold."""
        order, self._announced = NodeRequest("announce", RoundPosition(task)), task
        replies = self._ask(order, {node: [node] for node in range(self.nodes)}, {})
        return [_size(replies[node]) for node in range(self.nodes)]

    # ---- the participants of secure sums (perdure.privacy.secagg.transport)

    def public_keys(self, task: int, clients: list[int]) -> Mapping[int, bytes]:
        """The keys of these clients for a task, asked for once."""
        if self._keys[0] != task:
            self._keys = (task, {})
        known = self._keys[1]
        new = [client for client in clients if client not in known]
        if new:
            self._spot = RoundPosition(task)
            replies = self._ask(NodeRequest("keys", self._spot), self._by_node(new), {})
            found = {client: replies[client % self.nodes] for client in new}
            keys = {client: _bytes_of(reply, "keys", client) for client, reply in found.items()}
            known |= {client: key for client, key in keys.items() if key is not None}
        return {client: known[client] for client in clients if client in known}

    def announce(self, call: bytes) -> None:
        """The call that travels with the next work."""
        self._call = call

    def ask(self, requests: dict[int, bytes]) -> Mapping[int, bytes]:
        """Ask about clients that dropped out; the answers that came."""
        said = {str(client): request.hex() for client, request in requests.items()}
        order = NodeRequest("reveal", self._spot, requests=said)
        replies = self._ask(order, self._by_node(list(requests)), {})
        found = {c: _bytes_of(replies[c % self.nodes], "answers", c) for c in requests}
        return {client: answer for client, answer in found.items() if answer is not None}

    # ----

    def _by_node(self, clients: list[int]) -> dict[int, list[int]]:
        at: dict[int, list[int]] = {}
        for client in clients:
            at.setdefault(client % self.nodes, []).append(client)
        return at

    def _work(
        self, kind: Kind, clients: list[Client], model: Mapping[str, Tensors]
    ) -> dict[int, Upload | MaskedUpload | FailedUpload]:
        """The uploads by client; `model`: what each field holds that is a change of the model."""
        first, self._spot = clients[0], RoundPosition.of(clients[0].context)
        order = NodeRequest(kind, self._spot, sampled=len(clients))
        body = _body(first) | ({"call": self._call.hex()} if self._call else {})
        sealed, self._call = bool(self._call), b""
        replies = self._ask(order, self._by_node([client.id for client in clients]), body)
        found = {c.id: _upload_of(c, replies[c.id % self.nodes], sealed, model) for c in clients}
        return self._alike(found)

    def _ask(
        self, order: NodeRequest, at: dict[int, list[int]], body: Tree
    ) -> dict[int, Tree | FailedUpload]:
        if self._link is None:
            raise RunError("engine.kind: flower requires a federation, see perdure federation")
        if self._remote_tests and order.kind != "announce" and order.spot.task != self._announced:
            self._announce_task(order.spot.task)  # a server that was restarted
        data = pack(body)
        heads = {node: order.to(clients).head() for node, clients in at.items()}
        replies = self._link.send_and_receive(heads, data, 8 * len(data) + _ROOM)
        return {node: _opened(node, replies[node]) for node in at}

    def _alike(
        self, found: dict[int, Upload | MaskedUpload | FailedUpload]
    ) -> dict[int, Upload | MaskedUpload | FailedUpload]:
        """Leave out uploads that differ in form from the others, or from earlier rounds."""
        open_ = {
            c: up for c, up in found.items() if not isinstance(up, MaskedUpload | FailedUpload)
        }
        forms = {client: signature(upload) for client, upload in open_.items()}
        if not forms:
            return found
        at = self._spot.task, self._spot.exchange
        usual = self._known.get(at)
        if usual is None or usual not in forms.values():
            usual = Counter(forms.values()).most_common(1)[0][0]
        self._known[at] = usual
        return {
            client: FailedUpload(client, "fields, names or shapes unlike those of the others", True)
            if client in forms and forms[client] != usual
            else upload
            for client, upload in found.items()
        }

    def _counts(self, evaluator: Evaluator, tasks: list[int]) -> list[list[EvaluationCounts]]:
        server = evaluator.server
        order = NodeRequest("score", RoundPosition(evaluator.last_task), tasks=tuple(tasks))
        body = {
            "params": server.params,
            "buffers": server.buffers,
            "state": prediction_state(evaluator.method, server.state),
        }
        replies = self._ask(order, {node: [node] for node in range(self.nodes)}, body)
        return [_read_counts(reply, tasks, evaluator.last_task) for reply in replies.values()]


def _body(client: Client) -> Tree:
    """What all clients of a round receive."""
    fields = {name: value for name, value in client.broadcast.items() if name != "params"}
    params = client.broadcast["params"]
    return {"params": params, "buffers": client.buffers, "broadcast": fields}


def _opened(node: int, reply: bytes | FailedUpload) -> Tree | FailedUpload:
    if isinstance(reply, FailedUpload):
        return reply
    try:
        return unpack(reply)
    except BadMessage as error:
        return FailedUpload(node, str(error), True)


def _size(reply: Tree | FailedUpload) -> int:
    """What a node says that it holds; nothing if it does not answer well."""
    value = None if isinstance(reply, FailedUpload) else reply.get("train")
    return value if isinstance(value, int) and value >= 0 else 0


def _bytes_of(reply: Tree | FailedUpload, part: str, client: int) -> bytes | None:
    values = None if isinstance(reply, FailedUpload) else reply.get(part)
    return to_bytes(values.get(str(client))) if isinstance(values, dict) else None


def _upload_of(
    client: Client, reply: Tree | FailedUpload, sealed: bool, model: Mapping[str, Tensors]
) -> Upload | MaskedUpload | FailedUpload:
    if isinstance(reply, FailedUpload):
        return FailedUpload(client.id, reply.reason, reply.answered)
    masked = _bytes_of(reply, "sealed", client.id) if sealed else None
    if masked is not None:
        return MaskedUpload(client.id, masked)
    uploads = reply.get("uploads")
    mine = uploads.get(str(client.id)) if isinstance(uploads, dict) else None
    if mine is None:
        return FailedUpload(client.id, "an answer without this client", True)
    try:
        upload = read_upload(mine)
        _check_model_fields(upload, model)
    except BadMessage as error:
        return FailedUpload(client.id, str(error), True)
    if sealed and upload:
        return FailedUpload(client.id, "an upload that is not masked", True)
    return upload


def _check_model_fields(upload: Upload, model: Mapping[str, Tensors]) -> None:
    """Updates are of the model that is trained: its names, shapes and types."""
    for name, known in model.items():
        value = upload[name].value if name in upload else {}
        for key, tensor in value.items():
            if key not in known:
                raise BadMessage(f"{name}: {key!r} is not in the model that is trained")
            wanted, got = known[key], tensor
            if wanted.shape != got.shape or wanted.dtype != got.dtype:
                raise BadMessage(
                    f"{name}: {key} is {got.dtype} {tuple(got.shape)}, "
                    f"not {wanted.dtype} {tuple(wanted.shape)}"
                )


def signature(upload: Upload) -> Signature:
    """The form of an upload: of a Sum all shapes, of an Each (whose shapes may vary) the ranks."""
    found = []
    for name, part in sorted(upload.items()):
        each = isinstance(part, Each)
        forms = [
            f"{key} {tensor.dtype} {tensor.dim() if each else tuple(tensor.shape)}"
            for key, tensor in sorted(part.value.items())
        ]
        found.append((name, type(part).__name__, *forms))
    return tuple(found)


def _read_counts(
    reply: Tree | FailedUpload, tasks: list[int], newest: int
) -> list[EvaluationCounts]:
    """The sums of a node, task by task; none if it did not answer well."""
    parts = None if isinstance(reply, FailedUpload) else reply.get("counts")
    if not isinstance(parts, list) or len(parts) != len(tasks):
        return []
    try:
        return [read_count(part, task, newest) for part, task in zip(parts, tasks, strict=True)]
    except BadMessage:
        return []


def _scores(counts: list[list[EvaluationCounts]], place: int, task: Task) -> Evaluation:
    found = [mine[place] for mine in counts if mine and mine[place].total]
    if not found:
        raise RunError(f"no node could test the model on task {task.index + 1}")
    total = found[0]
    for other in found[1:]:
        total = total + other
    return total.evaluation()
