"""Read and check the replies of nodes.

A node can be broken or malicious. Its reply is decoded without pickle, and the names, shapes and
types of an upload must be those of the model and of the other clients' uploads.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any

from perdure.contract.client_weights import check_weights, limit_weights, max_weight
from perdure.contract.context import Client
from perdure.contract.evaluation import EvaluationCounts
from perdure.contract.upload_collector import FailedUpload, MaskedUpload
from perdure.contract.uploads import Each, Sum, Upload
from perdure.core.received import brief
from perdure.core.trees import Tensors, Tree
from perdure.flower.evaluation_counts import NeededCounts, read_counts
from perdure.flower.protocol import LARGEST_SIZE, BadMessage, read_upload, to_bytes, unpack

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
    """Return a client's upload, checked.

    Args:
        member: The client, as the server knows it.
        reply: The reply of its node.
        secure: Whether uploads must be masked.
        model_fields: Tensors of the trained model, by the field whose names, shapes and types must
            be theirs.
    """
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

        Args:
            place: The task, and the position of the exchange within it.
            uploads: The uploads of a round or an exchange, by client.
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
    """Return a node's evaluation counts, one per task; empty without a valid reply.

    Args:
        reply: The reply of the node.
        tasks: The tasks that were asked for.
        last_task: The last task trained so far.
        needed: The counts for metrics that were asked for.
    """
    trees = None if isinstance(reply, FailedUpload) else reply.get("counts")
    if not isinstance(trees, list) or len(trees) != len(tasks):
        return []
    try:
        pairs = zip(trees, tasks, strict=True)
        return [read_counts(tree, task, last_task, needed) for tree, task in pairs]
    except BadMessage as error:
        log.warning("evaluation counts of a node are left out: %s", error)
        return []
