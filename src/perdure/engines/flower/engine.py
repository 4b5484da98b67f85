"""The engine of a real federation: it sends orders to nodes and checks what comes back.

A node can be late, broken or malicious. What it sends is decoded without pickle, and names, shapes
and types must be those of the model and of the other clients' answers; whoever answers with
something else is left out of the round, by name and with the reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

import numpy as np

from perdure.config import Config
from perdure.data.examples import Array
from perdure.data.tasks import Stream, Task
from perdure.engines.flower.agreed import node_count, remote_stream
from perdure.engines.flower.wire import (
    BadMessage,
    Kind,
    Order,
    Spot,
    pack,
    read_count,
    read_upload,
    to_bytes,
    unpack,
)
from perdure.engines.work import Job, Keep
from perdure.errors import RunError
from perdure.federation.evaluation import Count, Judge, Scores
from perdure.federation.messages import Answers, Each, Failure, Sealed, Upload, single
from perdure.methods.base import Client, Finish, Method, Place
from perdure.trees import Tensors, Tree

Signature = tuple[tuple[str, ...], ...]
_ROOM = 64 << 20
"""Bytes that a reply may have beyond eight times what was sent."""


class Link(Protocol):
    """The way to the nodes."""

    def exchange(
        self, heads: Mapping[int, str], body: bytes, limit: int
    ) -> dict[int, bytes | Failure]:
        """Send each node its head and all the same body; the replies by node.

        A node that does not answer in time, or with more bytes than `limit`, has a Failure.
        """
        ...


class FlowerEngine:
    """Client work by the nodes of a federation. Client c is at node c modulo the nodes."""

    name = "flower"

    def __init__(self, nodes: int, link: Link | None, remote_tests: bool = False) -> None:
        self.nodes, self._link, self._remote_tests = nodes, link, remote_tests
        self._known: dict[str, Signature] = {}
        self._keys: tuple[int, dict[int, bytes]] = (-1, {})
        self._call, self._spot = b"", Spot(0, 0)

    @classmethod
    def of(cls, config: Config) -> FlowerEngine:
        """For a config that is looked at outside a federation: there is no way to any node."""
        return cls(node_count(config), None, config.federation is not None)

    def stream(self, config: Config) -> Stream | None:
        """The stream without its data, where nodes have data of their own."""
        return remote_stream(config, self.sizes) if config.federation is not None else None

    def choice(self) -> Tree:
        """Nothing: which engine a node uses is the config's to say."""
        return {}

    def restore(self, choice: Tree) -> None:
        """Nothing to take up."""

    def train(
        self, job: Job, clients: list[Client], keep: Keep
    ) -> Iterator[Answers | Sealed | Failure]:
        """One order a node; what clients keep stays on their node."""
        found = self._work("train", clients)
        for client in clients:
            done = found[client.id]
            if isinstance(done, Failure | Sealed):
                yield done
            else:
                yield single(client.id, client.weight, done)

    def extract(
        self, method: Method, clients: Iterable[Client]
    ) -> Iterator[tuple[Client, Finish | Sealed | Failure]]:
        """One order a node."""
        work = list(clients)
        found = self._work("extract", work) if work else {}
        for client in work:
            done = found[client.id]
            yield client, done if isinstance(done, Failure | Sealed) else Finish(done)

    def score(self, judge: Judge, tasks: list[Task]) -> list[Scores]:
        """On the server's own test data, or on that of the nodes, which send sums."""
        if not self._remote_tests:
            return [judge.score(task) for task in tasks]
        counts = self._counts(judge, [task.index for task in tasks])
        return [_scores(counts, place, task) for place, task in enumerate(tasks)]

    def sizes(self, task: int, tasks: int) -> Array:
        """Announce a task to all nodes: how many training rows of it each one holds.

        Without a way to them as if each held one, so that a config can be checked.
        """
        if self._link is None:
            return np.ones(self.nodes, dtype=np.int64)
        order = Order("announce", Spot(task, tasks))
        replies = self._ask(order, {node: [node] for node in range(self.nodes)}, {})
        found = [_size(replies[node]) for node in range(self.nodes)]
        return np.array([size if isinstance(size, int) else 0 for size in found])

    # ---- the participants of secure sums (perdure.privacy.crowd)

    def public_keys(self, task: int, clients: list[int]) -> Mapping[int, bytes]:
        """The keys of these clients for a task, asked for once."""
        if self._keys[0] != task:
            self._keys = (task, {})
        known = self._keys[1]
        new = [client for client in clients if client not in known]
        if new:
            self._spot = Spot(task, self._spot.tasks)
            replies = self._ask(Order("keys", self._spot), self._by_node(new), {})
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
        order = Order("reveal", self._spot, requests=said)
        replies = self._ask(order, self._by_node(list(requests)), {})
        found = {c: _bytes_of(replies[c % self.nodes], "answers", c) for c in requests}
        return {client: answer for client, answer in found.items() if answer is not None}

    # ----

    def _by_node(self, clients: list[int]) -> dict[int, list[int]]:
        at: dict[int, list[int]] = {}
        for client in clients:
            at.setdefault(client % self.nodes, []).append(client)
        return at

    def _work(self, kind: Kind, clients: list[Client]) -> dict[int, Upload | Sealed | Failure]:
        first, self._spot = clients[0], Spot.of(clients[0].place)
        order = Order(kind, self._spot, sampled=len(clients))
        body = _body(first) | ({"call": self._call.hex()} if self._call else {})
        sealed, self._call = bool(self._call), b""
        replies = self._ask(order, self._by_node([client.id for client in clients]), body)
        found = {c.id: _upload_of(c, replies[c.id % self.nodes], sealed) for c in clients}
        return self._alike(kind, found)

    def _ask(self, order: Order, at: dict[int, list[int]], body: Tree) -> dict[int, Tree | Failure]:
        if self._link is None:
            raise RunError("engine.kind: flower runs inside a federation, see perdure server")
        data = pack(body)
        heads = {node: order.to(clients).head() for node, clients in at.items()}
        replies = self._link.exchange(heads, data, 8 * len(data) + _ROOM)
        return {node: _opened(node, replies[node]) for node in at}

    def _alike(
        self, kind: str, found: dict[int, Upload | Sealed | Failure]
    ) -> dict[int, Upload | Sealed | Failure]:
        """Leave out uploads that differ in form from the others, or from earlier rounds."""
        open_ = {c: up for c, up in found.items() if not isinstance(up, Sealed | Failure)}
        forms = {client: signature(upload) for client, upload in open_.items()}
        if not forms:
            return found
        usual = self._known.get(kind) if self._known.get(kind) in forms.values() else None
        usual = usual or Counter(forms.values()).most_common(1)[0][0]
        self._known[kind] = usual
        return {
            client: Failure(client, "fields, names or shapes unlike those of the others", True)
            if client in forms and forms[client] != usual
            else upload
            for client, upload in found.items()
        }

    def _counts(self, judge: Judge, tasks: list[int]) -> list[list[Count]]:
        server = judge.server
        spot = Spot(judge.newest, len(judge.network.outputs.task_classes))
        order = Order("score", spot, tasks=tuple(tasks))
        body = {
            "params": server.params,
            "buffers": server.buffers,
            "memory": judge.method.export(server),
        }
        replies = self._ask(order, {node: [node] for node in range(self.nodes)}, body)
        return [_read_counts(reply, tasks, judge.newest) for reply in replies.values()]


def _body(client: Client) -> Tree:
    """What all clients of a round receive."""
    received = {name: value for name, value in client.received.items() if name != "params"}
    return {"params": client.params, "buffers": client.buffers, "received": received}


def _opened(node: int, reply: bytes | Failure) -> Tree | Failure:
    if isinstance(reply, Failure):
        return reply
    try:
        return unpack(reply)
    except BadMessage as error:
        return Failure(node, str(error), True)


def _size(reply: Tree | Failure) -> int | None:
    value = None if isinstance(reply, Failure) else reply.get("train")
    return value if isinstance(value, int) and value >= 0 else None


def _bytes_of(reply: Tree | Failure, part: str, client: int) -> bytes | None:
    values = None if isinstance(reply, Failure) else reply.get(part)
    return to_bytes(values.get(str(client))) if isinstance(values, dict) else None


def _upload_of(client: Client, reply: Tree | Failure, sealed: bool) -> Upload | Sealed | Failure:
    if isinstance(reply, Failure):
        return Failure(client.id, reply.reason, reply.answered)
    masked = _bytes_of(reply, "sealed", client.id) if sealed else None
    if masked is not None:
        return Sealed(client.id, masked)
    uploads = reply.get("uploads")
    mine = uploads.get(str(client.id)) if isinstance(uploads, dict) else None
    if mine is None:
        return Failure(client.id, "an answer without this client", True)
    try:
        upload = read_upload(mine)
        _check_model_fields(upload, client.params, client.buffers, client.place)
    except BadMessage as error:
        return Failure(client.id, str(error), True)
    if sealed and upload:
        return Failure(client.id, "an upload that is not masked", True)
    return upload


def _check_model_fields(upload: Upload, params: Tensors, buffers: Tensors, place: Place) -> None:
    """Updates are of the model that was sent: its names, shapes and types."""
    for name, known in (("update", params), ("buffers", buffers)):
        value = upload[name].value if name in upload else {}
        for key, tensor in value.items():
            if key not in known:
                raise BadMessage(f"{name}: {key!r} is not in the model")
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


def _read_counts(reply: Tree | Failure, tasks: list[int], newest: int) -> list[Count]:
    """The sums of a node, task by task; none if it did not answer well."""
    parts = None if isinstance(reply, Failure) else reply.get("counts")
    if not isinstance(parts, list) or len(parts) != len(tasks):
        return []
    try:
        return [read_count(part, task, newest) for part, task in zip(parts, tasks, strict=True)]
    except BadMessage:
        return []


def _scores(counts: list[list[Count]], place: int, task: Task) -> Scores:
    found = [mine[place] for mine in counts if mine and mine[place].total]
    if not found:
        raise RunError(f"no node could test the model on task {task.index + 1}")
    total = found[0]
    for other in found[1:]:
        total = total + other
    return total.scores()
