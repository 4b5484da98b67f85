"""The messages between server and nodes as bytes: safetensors and JSON, never pickle."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, Literal, get_args

import torch
from torch import Tensor

from perdure.contract.context import Client, Context
from perdure.contract.uploads import Each, Field, Sum, Upload
from perdure.core.received import (
    Entries,
    Hexadecimal,
    Integer,
    Items,
    Mapped,
    Number,
    Octets,
    OneOf,
    Optional,
    Part,
    TensorMap,
    brief,
    read_json,
    read_mapping,
    read_message,
    read_tensors,
    read_text,
)
from perdure.core.trees import Tensors, Tree, decode_message, encode
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


_LONGEST_REQUEST = 1 << 30
"""Upper bound on the digits of a request of secure aggregation."""
PositionNumber = Annotated[int, Integer(1 - _STEPS, _STEPS - 1)]
Numbers = Annotated[tuple[int, ...], Items(Integer(0, _STEPS - 1), _STEPS, distinct=True)]
"""Clients or tasks, each once."""


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

    task: PositionNumber
    """Index of the task."""
    round: PositionNumber = 0
    """Index of the round within the task."""
    rounds: PositionNumber = 0
    """Rounds of the task."""
    clients_with_data: PositionNumber = 0
    """Clients that hold data of the task."""
    exchange: PositionNumber = 0
    """Position within the task, as `Context.exchange`: 0 for training."""
    attempt: PositionNumber = 0
    """Number of earlier attempts at this round."""

    @classmethod
    def of(cls, context: Context) -> RoundPosition:
        """Return the position of a context."""
        return cls(
            context.task, context.round, context.rounds, context.clients_with_data,
            context.exchange, context.attempt,
        )  # fmt: skip

    @property
    def sequence_number(self) -> int:
        """A number that grows along the run, by which client states are stored."""
        phase = 1 + (self.exchange > 0) - (self.exchange < 0)
        return (_PHASES * self.task + phase) * _STEPS + (abs(self.exchange) or self.round)

    def read_again(self) -> RoundPosition:
        """Return the position; BadMessage if no server could have sent it."""
        with as_bad_message():
            found: RoundPosition = Part(RoundPosition).read("position", asdict(self))
        return found

    def check(self) -> None:
        """Raise a BadMessage if no run has such a place."""
        smallest = min(self.task, self.clients_with_data, self.attempt)
        if smallest < 0 or not 0 <= self.round <= self.rounds:
            raise BadMessage(
                f"task {self.task + 1}, round {self.round + 1} of {self.rounds} does not exist"
            )


@dataclass(frozen=True)
class NodeRequest:
    """The header of a request to one node."""

    kind: Annotated[Kind, OneOf(get_args(Kind))]
    """What the request asks for."""
    position: RoundPosition
    """The position in the run."""
    clients: Numbers = ()
    """The node's clients that are to work."""
    tasks: Numbers = ()
    """Tasks on whose data the model is to be evaluated."""
    evaluates_on: Annotated[EvaluationRows, OneOf(get_args(EvaluationRows))] = "test"
    """The rows on which the model is to be evaluated."""
    requests: Annotated[Mapping[str, str], Entries(Hexadecimal(sys.maxsize))] = field(
        default_factory=dict
    )
    """Requests of secure aggregation by client, as hex."""
    counts: Annotated[tuple[str, ...], Items(OneOf(COUNT_NAMES), 100, distinct=True)] = ()
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
        return read_message(NodeRequest, "request", read_json(text))


@dataclass(frozen=True)
class RequestBody:
    """What all clients of a request receive; which parts there are depends on its kind."""

    params: Annotated[Tensors | None, TensorMap()] = None
    """The model's parameters."""
    buffers: Annotated[Tensors | None, TensorMap()] = None
    """Its running statistics."""
    broadcast: Annotated[Tree | None, Mapped()] = None
    """The method's broadcast, which it alone can check."""
    state: Annotated[Tree | None, Mapped()] = None
    """The part of the server state that predictions need."""
    sum_request: Annotated[str | None, Hexadecimal(_LONGEST_REQUEST)] = None
    """The request for a secure sum."""

    def part(self, key: str) -> Tree:
        """Return one part; BadMessage if the request has none."""
        found: Tree | None = getattr(self, key)
        if found is None:
            raise BadMessage(f"the request has no {key}")
        return found


def read_body(tree: Tree) -> RequestBody:
    """Read the body of a request.

    Raises:
        BadMessage: A part has another type than those of a server, or is not known.

    """
    with as_bad_message():
        return read_message(RequestBody, "the request", tree, may_lack=True)


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


@dataclass(frozen=True)
class SentSum:
    """A Sum of an upload."""

    type: Annotated[str, OneOf(("Sum",))]
    weight: Annotated[float | None, Optional(Number(0, sys.float_info.max))]
    value: Annotated[Tensors, TensorMap()]


@dataclass(frozen=True)
class SentEach:
    """An Each of an upload."""

    type: Annotated[str, OneOf(("Each",))]
    value: Annotated[Tensors, TensorMap()]


def _read_field(name: str, tree: Any) -> Field:
    key = brief(name)
    entries = read_mapping(key, tree)
    value = entries.get("value")
    if not isinstance(value, dict) or not all(isinstance(t, Tensor) for t in value.values()):
        raise BadMessage(f"{key}: not a mapping of tensors")
    read_tensors(key, value)
    try:
        if entries.get("type") == "Each":
            return Each(read_message(SentEach, key, entries).value)
        found = read_message(SentSum, key, entries)
    except ValueError:
        raise BadMessage(f"{key}: neither a Sum with a valid weight nor an Each") from None
    return Sum(found.value, found.weight)


def to_tensor(data: bytes) -> Tensor:
    """Return bytes as a tensor, uint8 [N], for use in a tree."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.zeros(0).byte()


def to_bytes(value: Any) -> bytes | None:
    """Return the bytes of a tensor of `to_tensor`, or None if the value is not one."""
    try:
        return None if isinstance(value, str) else Octets().read("bytes", value)
    except ValueError:
        return None
