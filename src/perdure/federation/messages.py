"""The messages between server and nodes as bytes: safetensors and JSON, never pickle."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from perdure.contract.context import Client, Context
from perdure.contract.uploads import Each, Field, Sum, Upload
from perdure.core.received import (
    bad,
    brief,
    read_distinct,
    read_integer,
    read_json,
    read_list,
    read_mapping,
    read_tensors,
    read_text,
)
from perdure.core.trees import Tree, decode_message, encode
from perdure.data.streams.stream import EvaluationRows
from perdure.evaluation.counts import COUNT_NAMES

Kind = Literal["announce", "train", "exchange", "evaluate", "public_keys", "reveal", "end"]
"""What a request asks for: announce a task, train, run another exchange of the method, evaluate,
send public keys, answer a request of secure aggregation, or end the run."""
_STEPS = 1_000_000
"""Upper bound on the rounds of a task, and on all other numbers of a position."""
LARGEST_SIZE = 1 << 40
"""Upper bound on the examples that a node can hold."""
_PHASES = 3
"""Phases of a task: before training, training, its end."""


class BadMessage(ValueError):
    """Bytes that are not the expected message; the text says why."""


@contextmanager
def as_bad_message(text: str = "") -> Iterator[None]:
    """Turn a ValueError of the enclosed readers into a BadMessage, after a text if given."""
    try:
        yield
    except BadMessage:
        raise
    except ValueError as error:
        raise BadMessage(f"{text} ({error})" if text else str(error)) from None


@dataclass(frozen=True)
class RoundPosition:
    """The part of a `Context` that is sent; a node builds the network and the draws itself."""

    task: int
    """Index of the task."""
    round: int = 0
    """Index of the round within the task."""
    rounds: int = 0
    """Rounds of the task."""
    clients_with_data: int = 0
    """Clients that hold data of the task."""
    exchange: int = 0
    """Position within the task, as `Context.exchange`: 0 for training."""
    attempt: int = 0
    """Number of earlier attempts at this round."""

    @classmethod
    def of(cls, context: Context) -> RoundPosition:
        """Return the position of a context."""
        return cls(
            context.task, context.round, context.rounds, context.clients_with_data,
            context.exchange, context.attempt,
        )  # fmt: skip

    @classmethod
    def from_json(cls, values: Any) -> RoundPosition:
        """Restore a position from `to_json`.

        Raises:
            BadMessage: A number is missing, has the wrong type or is out of range.

        """
        with as_bad_message():
            position = cls(**read_mapping("position", values, cls(0).to_json()))
        position.check()
        return position

    def to_json(self) -> dict[str, Any]:
        """Return the position as a JSON object."""
        return asdict(self)

    @property
    def sequence_number(self) -> int:
        """A number that grows along the run, by which client states are stored."""
        phase = 1 + (self.exchange > 0) - (self.exchange < 0)
        return (_PHASES * self.task + phase) * _STEPS + (abs(self.exchange) or self.round)

    def check(self) -> None:
        """Refuse numbers that no run has.

        Raises:
            BadMessage: A number has the wrong type or range.

        """
        with as_bad_message():
            for key, value in self.to_json().items():
                read_integer(f"position: {key}", value, 1 - _STEPS, _STEPS - 1)
        smallest = min(self.task, self.clients_with_data, self.attempt)
        if smallest < 0 or not 0 <= self.round <= self.rounds:
            raise BadMessage(
                f"position: task {self.task + 1}, round {self.round + 1} of {self.rounds} "
                "does not exist"
            )


@dataclass(frozen=True)
class NodeRequest:
    """The header of a request to one node."""

    kind: Kind
    """What the request asks for."""
    position: RoundPosition
    """The position in the run."""
    clients: tuple[int, ...] = ()
    """The node's clients that are to work."""
    tasks: tuple[int, ...] = ()
    """Tasks on whose data the model is to be evaluated."""
    evaluates_on: EvaluationRows = "test"
    """The rows on which the model is to be evaluated."""
    requests: Mapping[str, str] = field(default_factory=dict)
    """Requests of secure aggregation by client, as hex."""
    counts: tuple[str, ...] = ()
    """Counts for metrics that an evaluation is to send beside those of accuracy."""

    def to_header(self) -> str:
        """Return the header as JSON."""
        return json.dumps(asdict(self))

    def for_clients(self, clients: list[int]) -> NodeRequest:
        """Return the same request for these clients."""
        return replace(self, clients=tuple(clients))


def read_header(text: str) -> NodeRequest:
    """Read the header of a request.

    Raises:
        BadMessage: The text is not a header.

    """
    with as_bad_message():
        values = read_mapping("request", read_json(text), (f.name for f in fields(NodeRequest)))
        return NodeRequest(
            _choice("kind", values["kind"], get_args(Kind)),
            RoundPosition.from_json(values["position"]),
            _numbers("clients", values["clients"]),
            _numbers("tasks", values["tasks"]),
            _choice("evaluates_on", values["evaluates_on"], get_args(EvaluationRows)),
            _read_requests(values["requests"]),
            _count_names(values["counts"]),
        )


def _choice(key: str, value: Any, allowed: tuple[Any, ...]) -> Any:
    if read_text(key, value) not in allowed:
        raise bad(key, value, f"one of {', '.join(allowed)}")
    return value


def _numbers(key: str, value: Any) -> tuple[int, ...]:
    """Return distinct numbers of clients or tasks."""
    numbers = [read_integer(key, n, 0, _STEPS - 1) for n in read_list(key, value, _STEPS)]
    return tuple(read_distinct(key, numbers))


def _read_requests(value: Any) -> dict[str, str]:
    """Return requests of secure aggregation by client, as hex."""
    requests = read_mapping("requests", value)
    for client, text in requests.items():
        if not re.fullmatch("0|[1-9][0-9]{0,6}", client):
            raise bad("requests", client, "the number of a client")
        bytes.fromhex(read_text("requests", text, sys.maxsize))
    return requests


def _count_names(value: Any) -> tuple[str, ...]:
    names = [_choice("counts", name, COUNT_NAMES) for name in read_list("counts", value, 100)]
    return tuple(read_distinct("counts", names))


def pack(tree: Tree) -> bytes:
    """Return the tree of a body or a reply as bytes."""
    return encode(tree)


def unpack(data: bytes) -> Tree:
    """Read the tree of a body or a reply.

    Raises:
        BadMessage: The bytes are not a tree.

    """
    with as_bad_message("the message cannot be decoded"):
        return decode_message(data)


def body_entry(tree: Tree, key: str) -> Tree:
    """Return a mapping of a request's body; BadMessage if the body has no such entry."""
    entry = tree.get(key)
    if not isinstance(entry, dict):
        raise BadMessage(f"the request has no {key}")
    return entry


def exchange_body(client: Client) -> Tree:
    """Return what all clients of an exchange receive."""
    fields = {name: value for name, value in client.broadcast.items() if name != "params"}
    params = client.broadcast["params"]
    return {"params": params, "buffers": client.buffers, "broadcast": fields}


def upload_tree(upload: Upload) -> Tree:
    """Return an upload as a tree."""
    return {name: _field_tree(field) for name, field in upload.items()}


def _field_tree(field: Field) -> Tree:
    if isinstance(field, Sum):
        return {"type": "Sum", "weight": field.weight, "value": field.value}
    return {"type": "Each", "value": field.value}


def read_upload(tree: Any) -> Upload:
    """Read an upload.

    Raises:
        BadMessage: The tree is not an upload.

    """
    with as_bad_message():
        fields = read_mapping("upload", tree)
        return {read_text("field", name): _read_field(name, v) for name, v in fields.items()}


def _read_field(name: str, tree: Any) -> Field:
    key = brief(name)
    entries = read_mapping(key, tree)
    value = entries.get("value")
    if not isinstance(value, dict) or not all(isinstance(t, Tensor) for t in value.values()):
        raise BadMessage(f"{key}: not a mapping of tensors")
    value, weight = read_tensors(key, value), entries.get("weight")
    if entries.get("type") == "Each" and set(entries) == {"type", "value"}:
        return Each(value)
    is_sum = entries.get("type") == "Sum" and set(entries) == {"type", "value", "weight"}
    if not is_sum or not (weight is None or _is_weight(weight)):
        raise BadMessage(f"{key}: neither a Sum with a valid weight nor an Each")
    return Sum(value, None if weight is None else float(weight))


def _is_weight(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 <= value <= sys.float_info.max  # false for NaN; integers may be larger


def to_tensor(data: bytes) -> Tensor:
    """Return bytes as a tensor, uint8 [N], for use in a tree."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.zeros(0).byte()


def to_bytes(value: Any) -> bytes | None:
    """Return the bytes of a tensor of `to_tensor`, or None if the value is not one."""
    is_octets = isinstance(value, Tensor) and value.dtype == torch.uint8 and value.dim() == 1
    return value.numpy().tobytes() if is_octets else None
