"""What travels between server and nodes, as bytes: safetensors and JSON, never pickle.

An order has two parts. The head is small and differs from node to node (who is to work); the body
(the model and what the method broadcast) is the same for all, so that it is stored and sent once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from perdure.contract.context import Context
from perdure.contract.evaluation import MODES, EvaluationCounts
from perdure.contract.uploads import Each, Field, Sum, Upload
from perdure.core.encoding import decode, encode
from perdure.core.trees import Tree

Kind = Literal["announce", "train", "exchange", "score", "keys", "reveal"]
_STEPS = 1_000_000
"""Room for a task's rounds in the number of a position."""
_PHASES = 3
"""Of a task: before training, training, its end."""


class BadMessage(ValueError):
    """Bytes that are not what was asked for; the text says why."""


@dataclass(frozen=True)
class RoundPosition:
    """The part of a Context that travels: a node makes the network and the draws by itself."""

    task: int
    round: int = 0
    rounds: int = 0
    lr: float = 0.0
    clients: int = 0
    """Clients that hold data of the task."""
    exchange: int = 0
    attempt: int = 0

    @classmethod
    def of(cls, context: Context) -> RoundPosition:
        """The spot of a context."""
        at = (context.task, context.round, context.rounds, context.lr, context.clients_with_data)
        return cls(*at, context.exchange, context.attempt)

    @property
    def position(self) -> int:
        """A number that grows along the run: what a node kept before it is what it had here."""
        phase = 1 + (self.exchange > 0) - (self.exchange < 0)
        return (_PHASES * self.task + phase) * _STEPS + (abs(self.exchange) or self.round)

    def check(self) -> None:
        """Refuse numbers that cannot be those of a run."""
        whole = (self.task, self.round, self.rounds, self.clients, self.exchange, self.attempt)
        if not all(type(number) is int and abs(number) < _STEPS for number in whole):
            raise BadMessage(f"a spot whose numbers are not whole, or too large: {whole}")
        if not (type(self.lr) in (int, float) and math.isfinite(self.lr) and self.lr >= 0):
            raise BadMessage(f"a learning rate of {self.lr!r}")
        if min(self.task, self.clients, self.attempt) < 0 or not 0 <= self.round <= self.rounds:
            raise BadMessage(f"task {self.task + 1}, round {self.round + 1} of {self.rounds}")


@dataclass(frozen=True)
class NodeRequest:
    """What a node is to do."""

    kind: Kind
    spot: RoundPosition
    clients: tuple[int, ...] = ()
    """Those of the node's clients that are to work."""
    tasks: tuple[int, ...] = ()
    """Tasks on whose test data the model is to be scored."""
    sampled: int = 0
    """Clients of the round, of which this node's are some."""
    requests: Mapping[str, str] = field(default_factory=dict)
    """What secure sums ask of clients, as hex."""

    def head(self) -> str:
        """The small part, as JSON."""
        return json.dumps(asdict(self))

    def to(self, clients: list[int]) -> NodeRequest:
        """The same order for some clients."""
        return replace(self, clients=tuple(clients))


def read_head(text: str) -> NodeRequest:
    """The inverse of Order.head."""
    try:
        values = json.loads(text)
        spot = RoundPosition(**values["spot"])
        clients, tasks = (tuple(int(n) for n in values[key]) for key in ("clients", "tasks"))
        kind: Kind = values["kind"]
        requests = {str(int(client)): str(text) for client, text in values["requests"].items()}
        sampled = int(values["sampled"])
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise BadMessage(f"an order that cannot be read ({error!r})") from None
    if kind not in get_args(Kind):
        raise BadMessage(f"an order of the unknown kind {kind!r}")
    return NodeRequest(kind, spot, clients, tasks, sampled, requests)


def pack(tree: Tree) -> bytes:
    """A body or a reply as bytes."""
    return encode(tree)


def unpack(data: bytes) -> Tree:
    """The inverse of pack."""
    try:
        tree = decode(data)
    except ValueError:
        raise BadMessage("an answer that cannot be decoded") from None
    if not isinstance(tree, dict):
        raise BadMessage("an answer that is no tree")
    return tree


def upload_tree(upload: Upload) -> Tree:
    """An upload as a tree."""
    return {name: _field_tree(part) for name, part in upload.items()}


def _field_tree(part: Field) -> Tree:
    if isinstance(part, Sum):
        return {"type": "Sum", "weight": part.weight, "value": part.value}
    return {"type": "Each", "value": part.value}


def read_upload(tree: Any) -> Upload:
    """The inverse of upload_tree; BadMessage for anything else."""
    if not isinstance(tree, dict):
        raise BadMessage("an upload that is no mapping of fields")
    return {str(name): _read_field(str(name), part) for name, part in tree.items()}


def _read_field(name: str, part: Any) -> Field:
    value = part.get("value") if isinstance(part, dict) else None
    if not isinstance(value, dict) or not all(isinstance(t, Tensor) for t in value.values()):
        raise BadMessage(f"{name}: not a mapping of tensors")
    if part.get("type") == "Each":
        return Each(value)
    weight = part.get("weight")
    if part.get("type") != "Sum" or not (weight is None or _is_weight(weight)):
        raise BadMessage(f"{name}: neither Sum nor Each, or with a weight that is none")
    return Sum(value, weight)


def _is_weight(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value) and value >= 0


def to_tensor(data: bytes) -> Tensor:
    """Bytes as a tensor, which travels as they are."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.zeros(0).byte()


def to_bytes(value: Any) -> bytes | None:
    """The inverse of to_tensor; None for anything else."""
    good = isinstance(value, Tensor) and value.dtype == torch.uint8 and value.dim() == 1
    return value.numpy().tobytes() if good else None


def count_tree(count: EvaluationCounts) -> Tree:
    """Return evaluation counts as a tree."""
    return {
        "task": count.task,
        "right": count.correct,
        "total": count.total,
        "told": count.predicted_tasks,
    }


def read_count(tree: Any, task: int, newest: int) -> EvaluationCounts:
    """The inverse of count_tree, for a certain task; BadMessage for anything else."""
    try:
        correct = {mode: float(tree["right"][mode]) for mode in MODES}
        total = float(tree["total"])
        predicted_tasks = None if tree["told"] is None else [float(value) for value in tree["told"]]
    except (TypeError, KeyError, ValueError) as error:
        raise BadMessage(f"a test result that cannot be read ({error!r})") from None
    good = all(0 <= value <= total for value in [*correct.values(), *(predicted_tasks or [])])
    if (
        not good
        or not math.isfinite(total)
        or (predicted_tasks is not None and len(predicted_tasks) != newest + 1)
    ):
        raise BadMessage("a test result whose numbers cannot be")
    return EvaluationCounts(task, correct, total, predicted_tasks)
