"""Read and check the replies of nodes, wait for them, and count what they sent twice."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from perdure.config import FederationConfig
from perdure.contract.context import Client
from perdure.contract.needs import max_weight
from perdure.contract.uploads import (
    Each,
    FailedUpload,
    MaskedUpload,
    Sum,
    Upload,
    check_weights,
    limit_weights,
)
from perdure.core.received import brief
from perdure.core.trees import Tensors, Tree
from perdure.data.streams.stream import Task
from perdure.deploy.model_files import prediction_state
from perdure.evaluation.evaluator import EvaluationCounts, Evaluator
from perdure.federation.evaluation_counts import NeededCounts, read_counts
from perdure.federation.messages import (
    LARGEST_SIZE,
    BadMessage,
    NodeRequest,
    RoundPosition,
    read_upload,
    to_bytes,
    unpack,
)
from perdure.federation.node.run import MOST_RELEASES
from perdure.training.sampling import below_quorum, missing_nodes

# ---- Read and check the replies of nodes
#
# A node can be broken or malicious. Its reply is decoded without pickle, and the names, shapes and
# types of an upload must be those of the model and of the other clients' uploads.

log = logging.getLogger(__name__)

ClientUpload = Upload | MaskedUpload | FailedUpload
"""One client's upload: plain, masked, or the reason why there is none."""
Reply = Tree | FailedUpload
"""A node's reply, or the reason why there is none."""
Signature = tuple[tuple[str, ...], ...]
"""Names, kinds, dtypes and shapes of an upload's fields."""

_LARGEST_LOSS = 1e9
"""Training losses beyond it, of a client that diverged or made it up, are not recorded."""


def decode_reply(node: int, reply: bytes | FailedUpload) -> Reply:
    """Return the tree of a node's reply, or a failure if it cannot be decoded."""
    if isinstance(reply, FailedUpload):
        return reply
    try:
        return unpack(reply)
    except BadMessage as error:
        return FailedUpload(node, str(error), True)


def read_size(node: int, reply: Reply) -> int | FailedUpload:
    """Return the number of training examples that a node reported, or a failure without one."""
    if isinstance(reply, FailedUpload):
        return reply
    size: Any = reply.get("size")
    if type(size) is int and 0 <= size <= LARGEST_SIZE:
        return size
    return FailedUpload(node, f"size: must be 0 to {LARGEST_SIZE} examples", True)


def read_client_bytes(reply: Reply, key: str, client: int) -> bytes | None:
    """Return the bytes that a reply holds for a client under a key, or None if there are none."""
    values = None if isinstance(reply, FailedUpload) else reply.get(key)
    return to_bytes(values.get(str(client))) if isinstance(values, dict) else None


def read_client_upload(
    member: Client, reply: Reply, secure: bool, model_fields: Mapping[str, Tensors]
) -> ClientUpload:
    """Return a client's upload, checked."""
    client = member.id
    if isinstance(reply, FailedUpload):
        return FailedUpload(client, reply.reason, reply.answered)
    masked = read_client_bytes(reply, "masked", client) if secure else None
    if masked is not None:
        return MaskedUpload(client, masked)
    uploads = reply.get("uploads")
    tree = uploads.get(str(client)) if isinstance(uploads, dict) else None
    if tree is None:
        return FailedUpload(client, "the reply has no upload of this client", True)
    try:
        upload = read_upload(tree)
        _check_model_fields(upload, model_fields)
        upload = _with_allowed_weights(upload, member)
    except BadMessage as error:
        return FailedUpload(client, str(error), True)
    if secure and upload:
        return FailedUpload(client, "the upload is not masked", True)
    return upload


def _with_allowed_weights(upload: Upload, client: Client) -> Upload:
    """Return an upload whose explicit weights are capped as the client's own weight is.

    Raises:
        BadMessage: A weight is larger than any that a client with the announced examples has.

    """
    mistake = check_weights(upload, max_weight(client.context.needs, float(len(client.data))))
    if mistake:
        raise BadMessage(mistake)
    return limit_weights(upload, client.max_weight)


def read_loss(reply: Reply, client: int) -> float | None:
    """Return a client's training loss, or None if its node sends none or no possible one.

    Nothing but a number in the record depends on it, so a bad one does not cost the client its
    upload. Integers of any size may arrive: they are compared before they become floats.
    """
    losses = {} if isinstance(reply, FailedUpload) else reply.get("losses", {})
    value: Any = losses.get(str(client)) if isinstance(losses, dict) else "not by client"
    if value is None:
        return None
    if type(value) in (int, float) and abs(value) <= _LARGEST_LOSS:
        return float(value)
    log.warning(
        "client %d: training loss: must be a number of at most %g; it is left out of the record",
        client, _LARGEST_LOSS,
    )  # fmt: skip
    return None


def _check_model_fields(upload: Upload, model_fields: Mapping[str, Tensors]) -> None:
    """Refuse updates whose names, shapes or types are not those of the trained model."""
    for name, expected in model_fields.items() if upload else ():
        value = upload[name].value if name in upload else {}
        if missing := expected.keys() - value.keys():
            raise BadMessage(f"{name}: {min(missing)} is missing")
        for key, tensor in value.items():
            if key not in expected:
                raise BadMessage(f"{name}: {brief(key)} is not in the model that is trained")
            wanted = expected[key]
            if wanted.shape != tensor.shape or wanted.dtype != tensor.dtype:
                raise BadMessage(
                    f"{name}: {key}: must be {wanted.dtype} {tuple(wanted.shape)}, "
                    f"got {tensor.dtype} {tuple(tensor.shape)}"
                )


def upload_signature(upload: Upload) -> Signature:
    """Return the form of an upload: shapes of a Sum, ranks of an Each, whose shapes may vary.

    Whether a Sum has an explicit weight is a part of the form, so that no client has one alone.
    """
    signature = []
    for name, field in sorted(upload.items()):
        is_each = isinstance(field, Each)
        kind = type(field).__name__
        if isinstance(field, Sum) and field.weight is not None:
            kind += " with its own weight"
        forms = [
            f"{key} {tensor.dtype} {tensor.dim() if is_each else tuple(tensor.shape)}"
            for key, tensor in sorted(field.value.items())
        ]
        signature.append((name, kind, *forms))
    return tuple(signature)


class UploadForms:
    """The forms of the uploads of one exchange, and of the rounds of a task.

    Uploads must have the form with which most clients began: nobody who replies first, or alone in
    a round, decides for the others.
    """

    def __init__(self) -> None:
        self._place = (-1, 0)
        self._first: dict[int, Signature] = {}  # by client, the form of its first upload there

    def drop_others(
        self, place: tuple[int, int], uploads: Mapping[int, ClientUpload]
    ) -> dict[int, ClientUpload]:
        """Return uploads, with a failure in the place of each that has another form.

        An upload without any field is of a client that has nothing to send.
        """
        if place != self._place:
            self._place, self._first = place, {}
        forms = {
            client: upload_signature(upload)
            for client, upload in uploads.items()
            if upload and not isinstance(upload, MaskedUpload | FailedUpload)
        }
        usual = self._usual(forms)
        return {
            client: _of_other_form(client) if forms.get(client, usual) != usual else upload
            for client, upload in uploads.items()
        }

    def _usual(self, forms: Mapping[int, Signature]) -> Signature | None:
        for client, form in forms.items():
            self._first.setdefault(client, form)
        begun, now = Counter(self._first.values()), Counter(forms.values())
        return max(now, key=lambda form: (begun[form], now[form]), default=None)


def _of_other_form(client: int) -> FailedUpload:
    reason = "fields, names or shapes differ from those of the other clients"
    return FailedUpload(client, reason, True)


def read_node_counts(
    reply: Reply, tasks: list[int], last_task: int, needed: NeededCounts
) -> list[EvaluationCounts]:
    """Return a node's evaluation counts, one per task; empty without a valid reply."""
    trees = None if isinstance(reply, FailedUpload) else reply.get("counts")
    if not isinstance(trees, list) or len(trees) != len(tasks):
        return []
    try:
        pairs = zip(trees, tasks, strict=True)
        return [read_counts(tree, task, last_task, needed) for tree, task in pairs]
    except BadMessage as error:
        log.warning("evaluation counts of a node are left out: %s", error)
        return []


# ---- Count the uploads that clients made twice at one place of a run, for the accounting of noise.
#
# A server that resumes from a checkpoint repeats requests. Nodes reply to the same request with the
# same bytes; only a request that differs from the one before is another release of noisy values.


class ExtraReleases:
    """By client, the uploads beyond one per round and exchange."""

    def __init__(self) -> None:
        self._extra: Counter[str] = Counter()

    def note(self, replies: Mapping[int, Reply], clients: Mapping[int, list[int]]) -> None:
        """Add what nodes say about the uploads in their replies."""
        for node, reply in replies.items():
            counts = {} if isinstance(reply, FailedUpload) else reply.get("releases", {})
            for client in clients[node] if isinstance(counts, dict) else ():
                count = counts.get(str(client))
                if type(count) is int and 1 < count <= MOST_RELEASES:
                    self._extra[str(client)] += count - 1

    def to_tree(self) -> Tree:
        """Return the counts by client, for the checkpoint."""
        return dict(self._extra)

    def restore(self, tree: Tree) -> None:
        """Restore the counts."""
        self._extra = Counter(tree)


# ---- Wait for nodes that are missing for the quorum, for a limited time

_FIRST_PAUSE, _LONGEST_PAUSE = 5.0, 60.0
"""Seconds until missing nodes are asked again, which double every time."""


class Waiting:
    """Pauses between requests, until a time is over that begins with the first pause."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._pause = seconds, _FIRST_PAUSE
        self._end: float | None = None

    def pause(self, reasons: Mapping[int, str]) -> bool:
        """Pause, and return whether to ask again; False if the time is over."""
        now = time.monotonic()
        if self._end is None:
            self._end = now + self._seconds
        if now >= self._end:
            return False
        for node, reason in reasons.items():
            log.warning("waiting for node-%d: %s", node, reason)
        time.sleep(min(self._pause, self._end - now))
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        return True


def ask_until_quorum(
    federation: FederationConfig | None,
    nodes: list[int],
    ask: Callable[[list[int]], dict[int, str]],
) -> dict[int, str]:
    """Ask nodes, and those that fail again as long as the quorum is not reached."""
    failed = ask(nodes)
    waiting = Waiting(federation.wait if federation is not None else 0.0)
    while missing_nodes(federation, nodes, failed) and waiting.pause(failed):
        failed = ask(sorted(failed))
    return failed


# ---- Evaluate a model on the test data of nodes, which send counts

Send = Callable[[NodeRequest, dict[int, list[int]], Tree], dict[int, Reply]]
"""Sends a request with a body to nodes for their clients, and returns the replies by node."""


def counts_of_nodes(
    send: Send, federation: FederationConfig | None, nodes: int, evaluator: Evaluator,
    tasks: list[Task],
) -> dict[int, list[EvaluationCounts]]:  # fmt: skip
    """Return the counts of each node, one per task; none of a node without a valid reply.

    Raises:
        RunError: Nodes are missing for the quorum.

    """
    numbers, last_task = [task.index for task in tasks], evaluator.last_task
    needed = NeededCounts(evaluator.needed_counts, tuple(evaluator.network.outputs.task_classes))
    request, body = _request(evaluator, tasks), _body(evaluator)
    counts: dict[int, list[EvaluationCounts]] = {}

    def ask(chosen: list[int]) -> dict[int, str]:
        replies = send(request, {node: [node] for node in chosen}, body)
        for node, reply in replies.items():
            counts[node] = read_node_counts(reply, numbers, last_task, needed)
        return {node: _reason(replies[node]) for node in chosen if not counts[node]}

    everyone = list(range(nodes))
    failed = ask_until_quorum(federation, everyone, ask)
    missing = missing_nodes(federation, everyone, failed)
    if missing:
        raise below_quorum(f"evaluation after task {last_task + 1}", missing, failed)
    for node, reason in failed.items():
        log.warning("the evaluation after task %d lacks node-%d: %s", last_task + 1, node, reason)
    return counts


def _request(evaluator: Evaluator, tasks: list[Task]) -> NodeRequest:
    return NodeRequest(
        "evaluate", RoundPosition(evaluator.last_task), tasks=tuple(task.index for task in tasks),
        evaluates_on=tasks[0].evaluates_on, counts=evaluator.needed_counts,
    )  # fmt: skip


def _body(evaluator: Evaluator) -> Tree:
    server = evaluator.server
    return {
        "params": server.params,
        "buffers": server.buffers,
        "state": prediction_state(evaluator.method, server.state),
    }


def _reason(reply: Reply) -> str:
    bad = "its evaluation counts are not valid"
    return reply.reason if isinstance(reply, FailedUpload) else bad
