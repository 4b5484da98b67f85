"""The events of a task as values: exchanges before training, training, exchanges at the task's end.

A field that is None means "as in FedAvg", so no engine asks which functions a class overrides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar

from perdure.contract.context import Client, Context, Server
from perdure.contract.step import LossTerm, Rows, Step
from perdure.contract.transforms import Transform
from perdure.contract.uploads import Change, ClientResult, CollectedUploads
from perdure.core.errors import check_name, refuse, type_name
from perdure.core.trees import Tensors

F = TypeVar("F", bound=Callable[..., Any])
Participants = Literal["all", "ever", "none"]
"""The clients of an exchange; see `Exchange.participants`."""


@dataclass(frozen=True)
class OncePerTask:
    """A broadcast value that a client receives once per task; it must not change in between."""

    value: Any
    """A tensor, or nested dicts of tensors."""


Broadcast = Callable[[Server, Context], Mapping[str, Any]]
"""Returns the fields that the server sends: by name a tensor, a dict of them, or a OncePerTask."""


@dataclass(frozen=True)
class Prepared:
    """Everything that is specific to one client in a training round."""

    initial_params: Tensors = field(default_factory=dict)
    """Initial values of trained parameters by name, instead of the received ones."""
    tensors: Tensors = field(default_factory=dict)
    """Passed to `extra_rows`, `loss` and `penalty` as `step.tensors`. All clients need the same
    names; when clients are stacked, smaller tensors are padded with zeros at the end."""
    transforms: tuple[Transform, ...] = ()
    """Changes of every local step, applied in this order."""


def _no_discount(staleness: int) -> float:
    return 1.0


@dataclass(frozen=True)
class Train:
    """The training rounds of a task; exactly one per task. With no field set it is FedAvg."""

    broadcast: Broadcast | None = None
    """Server, each round: the fields that are sent besides the model."""
    prepare: Callable[[Client], Prepared] | None = None
    """Client, each round, before its steps: its tensors, transforms and initial parameters."""
    extra_rows: Callable[[Step], Rows | dict[str, Rows]] | None = None
    """Each step: rows that are added to the batch, such as replayed examples."""
    loss: Callable[[Step], LossTerm] | None = None
    """Each step: one value per row. Default: cross-entropy."""
    penalty: Callable[[Step], LossTerm | list[LossTerm]] | None = None
    """Each step: a term that is added to the loss, one value per row or a Scalar."""
    make_upload: Callable[..., ClientResult] | None = None
    """Client, after its steps, called as `make_upload(client, local_update)`: fields that are added
    to `update` and `buffers` or replace them, and the client's new state. See `stacked`."""
    combine: Callable[[Server, CollectedUploads, Context], Tensors] | None = None
    """Server: combine the clients' updates into one. Default: `uploads.mean("update")`."""
    adjust: Callable[[Server, Change, CollectedUploads, Context], Change] | None = None
    """Server: change what is applied to the model, and set the server's state after the round."""
    rounds: int | None = None
    """Training rounds; 0 skips training. If None, `train.rounds` of the config."""
    trainable: tuple[str, ...] | None = None
    """Names that are trained, out of `context.parameters`; those of earlier tasks' outputs of a
    growing head may be among them. If None, `context.trainable`."""
    private: tuple[str, ...] = ()
    """Trained parameters that never leave a client; the engine stores and restores them."""
    batch_statistics: bool = True
    """Whether batch norm uses and updates the statistics of a batch."""
    per_client_updates: bool = False
    """Whether the server sees each client's update (`update` is an Each)."""
    buffer_size: int | None = None
    """Number of uploads after which a round closes; later uploads count in a later round. If None,
    rounds are synchronous."""
    staleness_weight: Callable[[int], float] = _no_discount
    """Factor on the weight of an upload, given how many rounds late it is (with `buffer_size`)."""
    clip_norms: Mapping[str, float] = field(default_factory=dict, hash=False)
    """By field of the upload a norm that it never exceeds, whatever the client's data, to which
    `privacy.clip` clips it instead of its own value. It must not depend on data."""


@dataclass(frozen=True)
class Exchange:
    """One exchange server -> clients -> server, before training or at the task's end.

    Without `broadcast` and `aggregate`, nothing is sent and each client works alone.

    Example:
        >>> import perdure
        >>> perdure.Exchange("statistics").communicates
        False

    """

    name: str
    """Unique within the task."""
    participants: Participants = "all"
    """`all`: clients with data of this task. `ever`: clients with data of any task so far. `none`:
    no clients; only `aggregate` runs, on the server."""
    broadcast: Broadcast | None = None
    """Server: the fields that are sent besides the model."""
    client_work: Callable[[Client], ClientResult] | None = None
    """Client: the fields that it sends, and its new state."""
    aggregate: Callable[[Server, CollectedUploads, Context], Server] | None = None
    """Server: its model and state after the exchange."""
    deferred: bool = False
    """Task end: whether it waits until the next task begins, and then runs first, with the data,
    clients and context of this task. A run that ends before never runs it. Clients must keep the
    task's data until then."""
    clip_norms: Mapping[str, float] = field(default_factory=dict, hash=False)
    """By field of the upload a norm that it never exceeds, whatever the client's data, to which
    `privacy.clip` clips it instead of its own value. It must not depend on data."""

    @property
    def communicates(self) -> bool:
        """Whether anything is sent between server and clients."""
        sends = self.broadcast is not None or self.aggregate is not None
        return self.participants != "none" and sends


def stacked(function: F) -> F:
    """Mark a `make_upload` that takes many clients at once.

    It is called as `make_upload(clients, local_update)` with a list of clients, and tensors with a
    leading client axis (also on the serial engine, with a list of one client). The tensors of the
    returned fields have the same leading axis; `state` is None or a list of one state per client.
    """
    function.stacked = True  # type: ignore[attr-defined]
    return function


def is_stacked(function: Callable[..., Any] | None) -> bool:
    """Return whether a `make_upload` is marked as stacked."""
    return bool(getattr(function, "stacked", False))


class TaskExchanges(NamedTuple):
    """The exchanges of one task."""

    opening: list[Exchange]
    """Before training."""
    train: Train
    """Training."""
    ending: list[Exchange]
    """At the task's end."""

    def at(self, position: int) -> Exchange:
        """Return the exchange at a position (`Context.exchange`); IndexError if there is none."""
        if position == 0:
            raise IndexError("position 0 is training")
        side = self.ending if position > 0 else self.opening
        return side[abs(position) - 1]

    def clip_norms(self, position: int) -> Mapping[str, float]:
        """Return `clip_norms` of the exchange at a position, 0 for training."""
        return self.at(position).clip_norms if position else self.train.clip_norms

    def with_positions(self, ending: bool) -> list[tuple[int, Exchange]]:
        """Return the opening or ending exchanges with their positions (`Context.exchange`)."""
        side, sign = (self.ending, 1) if ending else (self.opening, -1)
        return [(sign * number, exchange) for number, exchange in enumerate(side, start=1)]


def split_exchanges(exchanges: list[Exchange | Train]) -> TaskExchanges:
    """Return what a method's `exchanges` returned, split at its Train; refuse a wrong list."""
    for exchange in exchanges:
        if not isinstance(exchange, Exchange | Train):
            refuse("exchanges", type_name(exchange), "a list of Exchange and Train")
    positions = [i for i, exchange in enumerate(exchanges) if isinstance(exchange, Train)]
    if len(positions) != 1:
        refuse("exchanges", f"{len(positions)} of Train", "a list with exactly one Train")
    others = [exchange for exchange in exchanges if isinstance(exchange, Exchange)]
    names = [exchange.name for exchange in others]
    if len(set(names)) < len(names):
        refuse("exchanges", f"the names {names}", "a list with each name once")
    first = positions[0]
    train = exchanges[first]
    assert isinstance(train, Train)
    for exchange in others[:first]:
        if exchange.deferred:
            refuse("exchanges", f"{exchange.name!r} deferred before Train", "deferred after Train")
    return TaskExchanges(others[:first], train, others[first:])


def trained_names(train: Train, context: Context) -> tuple[str, ...]:
    """Return the names of the parameters that are trained."""
    for name in train.trainable or ():
        check_name("Train.trainable", name, context.parameters)
    return context.trainable if train.trainable is None else train.trainable


def sent_names(train: Train, context: Context) -> tuple[str, ...]:
    """Return the names of the trained parameters that are sent: all but the private ones."""
    trained = trained_names(train, context)
    for name in train.private:
        check_name("Train.private", name, trained)
    return tuple(name for name in trained if name not in train.private)
