"""The messages between server and nodes as bytes: safetensors and JSON, never pickle.

A request has two parts. The header is small and differs from node to node: it names the clients
that work. The body, which holds the model and the method's broadcast, is the same for all nodes, so
that Flower stores and sends it once.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from perdure.contract.context import Client, Context
from perdure.contract.score_counts import COUNT_NAMES
from perdure.contract.uploads import Each, Field, Sum, Upload
from perdure.core.encoding import decode, encode
from perdure.core.trees import Tree
from perdure.data.streams.stream import EvaluationRows

Kind = Literal["announce", "train", "exchange", "score", "keys", "reveal", "end"]
"""What a request asks for: announce a task, train, run another exchange of the method, evaluate,
send public keys, answer a request of secure aggregation, or end the run."""
_STEPS = 1_000_000
"""Upper bound on the rounds of a task, and on all other numbers of a position."""
_PHASES = 3
"""Phases of a task: before training, training, its end."""


class BadMessage(ValueError):
    """Bytes that are not the expected message; the text says why."""


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
    def from_json(cls, values: Mapping[str, Any]) -> RoundPosition:
        """Restore a position from `to_json`."""
        names = {"clients": "clients_with_data"}
        return cls(**{names.get(key, key): value for key, value in values.items()})

    def to_json(self) -> dict[str, Any]:
        """Return the position as a JSON object."""
        return {
            "task": self.task, "round": self.round, "rounds": self.rounds,
            "clients": self.clients_with_data, "exchange": self.exchange, "attempt": self.attempt,
        }  # fmt: skip

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
        integers = (
            self.task, self.round, self.rounds, self.clients_with_data, self.exchange, self.attempt,
        )  # fmt: skip
        if not all(type(number) is int and abs(number) < _STEPS for number in integers):
            raise BadMessage(f"position: must be integers below {_STEPS}, got {integers}")
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
        values = {
            "kind": self.kind, "spot": self.position.to_json(), "clients": self.clients,
            "tasks": self.tasks, "rows": self.evaluates_on, "requests": dict(self.requests),
            **({"counts": self.counts} if self.counts else {}),
        }  # fmt: skip
        return json.dumps(values)

    def for_clients(self, clients: list[int]) -> NodeRequest:
        """Return the same request for these clients."""
        return replace(self, clients=tuple(clients))


def read_header(text: str) -> NodeRequest:
    """Read the header of a request.

    Args:
        text: JSON of `NodeRequest.to_header`.

    Raises:
        BadMessage: The text is not a header.
    """
    try:
        values = json.loads(text)
        position = RoundPosition.from_json(values["spot"])
        clients, tasks = (tuple(int(n) for n in values[key]) for key in ("clients", "tasks"))
        kind: Kind = values["kind"]
        requests = {str(int(client)): str(text) for client, text in values["requests"].items()}
        rows = values["rows"]
        counts = tuple(str(name) for name in values.get("counts", ()))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise BadMessage(f"the request cannot be read ({error!r})") from None
    if kind not in get_args(Kind):
        raise BadMessage(f"kind: must be one of {', '.join(get_args(Kind))}, got {kind!r}")
    if rows not in get_args(EvaluationRows):
        raise BadMessage(
            f"rows: must be one of {', '.join(get_args(EvaluationRows))}, got {rows!r}"
        )
    if not set(counts) <= set(COUNT_NAMES):
        raise BadMessage(f"counts: must be some of {', '.join(COUNT_NAMES)}, got {counts!r}")
    return NodeRequest(kind, position, clients, tasks, rows, requests, counts)


def pack(tree: Tree) -> bytes:
    """Return the tree of a body or a reply as bytes."""
    return encode(tree)


def unpack(data: bytes) -> Tree:
    """Read the tree of a body or a reply.

    Raises:
        BadMessage: The bytes are not a tree.
    """
    try:
        tree = decode(data)
    except ValueError:
        raise BadMessage("the message cannot be decoded") from None
    if not isinstance(tree, dict):
        raise BadMessage(f"the message must be a mapping, got {type(tree).__name__}")
    return tree


def body_entry(tree: Tree, key: str) -> Tree:
    """Return a mapping of a request's body.

    Raises:
        BadMessage: The body has no such entry.
    """
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

    Args:
        tree: From `upload_tree`.

    Raises:
        BadMessage: The tree is not an upload.
    """
    if not isinstance(tree, dict):
        raise BadMessage(f"upload: must be a mapping of fields, got {type(tree).__name__}")
    return {str(name): _read_field(str(name), value) for name, value in tree.items()}


def _read_field(name: str, tree: Any) -> Field:
    value = tree.get("value") if isinstance(tree, dict) else None
    if not isinstance(value, dict) or not all(isinstance(t, Tensor) for t in value.values()):
        raise BadMessage(f"{name}: not a mapping of tensors")
    if tree.get("type") == "Each":
        return Each(value)
    weight = tree.get("weight")
    if tree.get("type") != "Sum" or not (weight is None or _is_weight(weight)):
        raise BadMessage(f"{name}: neither a Sum with a valid weight nor an Each")
    return Sum(value, weight)


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
