"""What happens in a task, as values: exchanges before training, training, exchanges at its end.

A field that is None means "as in FedAvg", so that nobody asks which functions a class overrides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar

from perdure.contract.checks import check_name, refuse
from perdure.contract.context import Client, Context, Server
from perdure.contract.step import Rows, Step, Term
from perdure.contract.transforms import Transform
from perdure.contract.uploads import Change, ClientResult, CollectedUploads
from perdure.core.trees import Tensors

F = TypeVar("F", bound=Callable[..., Any])
Participants = Literal["all", "ever", "none"]


@dataclass(frozen=True)
class OncePerTask:
    """A broadcast value that a client receives once per task; it must not change within it."""

    value: Any


Broadcast = Callable[[Server, Context], Mapping[str, Any]]


@dataclass(frozen=True)
class Prepared:
    """What is one client's alone in a round of training."""

    initial_params: Tensors = field(default_factory=dict)
    """Trained parameters to begin with in place of those received."""
    tensors: Tensors = field(default_factory=dict)
    """For `extra_rows`, `loss` and `penalty`; in a stack smaller ones are padded with zeros at
    their end."""
    transforms: tuple[Transform, ...] = ()


def _no_discount(staleness: int) -> float:
    return 1.0


@dataclass(frozen=True)
class Train:
    """The training rounds of a task; exactly one per task. With no field set it is FedAvg."""

    broadcast: Broadcast | None = None
    """Server, each round: what is sent besides the model, by name (tensors and dicts of them)."""
    prepare: Callable[[Client], Prepared] | None = None
    """Client, each round, before its steps."""
    extra_rows: Callable[[Step], Rows | dict[str, Rows]] | None = None
    """Each step: rows that join the batch."""
    loss: Callable[[Step], Term] | None = None
    """Each step: one value per row. Default: cross-entropy."""
    penalty: Callable[[Step], Term | list[Term]] | None = None
    """Each step: added to the loss."""
    make_upload: Callable[..., ClientResult] | None = None
    """Client, after its steps, as `make_upload(client, local_update)`: fields that are added to
    `update` and `buffers` or replace them, and the client's state. See `stacked`."""
    combine: Callable[[Server, CollectedUploads, Context], Tensors] | None = None
    """Server: one update out of the clients'. Default: `uploads.mean("update")`."""
    adjust: Callable[[Server, Change, CollectedUploads, Context], Change] | None = None
    """Server: what is applied to the model, and the server's state after the round."""
    rounds: int | None = None
    """If None, train.rounds of the config. 0: no training rounds."""
    trainable: tuple[str, ...] | None = None
    """Names that are trained, out of `context.trainable`. If None, all of them."""
    private: tuple[str, ...] = ()
    """Trained parameters that never leave a client; the engine keeps and restores them."""
    batch_statistics: bool = True
    """Whether batch norm uses and updates the statistics of a batch."""
    per_client_updates: bool = False
    """Whether the server sees each client's update (`update` is an Each)."""
    buffer_size: int | None = None
    """Asynchronous: a round closes after so many uploads; later ones count in a later round."""
    staleness_weight: Callable[[int], float] = _no_discount
    """Asynchronous: factor on the weight of an upload that is so many rounds late."""


@dataclass(frozen=True)
class Exchange:
    """One exchange server -> clients -> server, before training or at the task's end.

    Nothing travels if it has neither `broadcast` nor `aggregate`.
    """

    name: str
    participants: Participants = "all"
    """`all`: clients with data of this task. `ever`: of any task so far. `none`: nobody."""
    broadcast: Broadcast | None = None
    client_work: Callable[[Client], ClientResult] | None = None
    aggregate: Callable[[Server, CollectedUploads, Context], Server] | None = None

    @property
    def travels(self) -> bool:
        """Whether anything is sent."""
        sends = self.broadcast is not None or self.aggregate is not None
        return self.participants != "none" and sends


def stacked(function: F) -> F:
    """Mark a `make_upload` that takes many clients at once.

    It is called as `make_upload(clients, local_update)`: a list of clients, and tensors with a
    leading client axis, on the serial engine too (a list of one). The fields that it returns are
    stacked likewise; its `state` is a list with one state per client, or None.
    """
    function.stacked = True  # type: ignore[attr-defined]
    return function


def is_stacked(function: Callable[..., Any] | None) -> bool:
    """Return whether a `make_upload` is marked as stacked."""
    return bool(getattr(function, "stacked", False))


class TaskExchanges(NamedTuple):
    """The exchanges of one task."""

    opening: list[Exchange]
    train: Train
    ending: list[Exchange]

    def at(self, position: int) -> Exchange:
        """Return the exchange at `Context.exchange`; IndexError if there is none."""
        if position == 0:
            raise IndexError("position 0 is training")
        side = self.ending if position > 0 else self.opening
        return side[abs(position) - 1]

    def numbered(self, ending: bool) -> list[tuple[int, Exchange]]:
        """Return one side's exchanges with their positions."""
        side, sign = (self.ending, 1) if ending else (self.opening, -1)
        return [(sign * number, exchange) for number, exchange in enumerate(side, start=1)]


def split_exchanges(exchanges: list[Exchange | Train]) -> TaskExchanges:
    """Return what comes before training, training, and what comes after it."""
    for exchange in exchanges:
        if not isinstance(exchange, Exchange | Train):
            refuse("exchanges", f"a {type(exchange).__name__}", "Exchange and Train")
    at = [i for i, exchange in enumerate(exchanges) if isinstance(exchange, Train)]
    if len(at) != 1:
        refuse("exchanges", f"{len(at)} of Train", "exactly one")
    others = [exchange for exchange in exchanges if isinstance(exchange, Exchange)]
    names = [exchange.name for exchange in others]
    if len(set(names)) < len(names):
        refuse("exchanges", f"the names {names}", "each name once")
    train = exchanges[at[0]]
    assert isinstance(train, Train)
    return TaskExchanges(others[: at[0]], train, others[at[0] :])


def trained_names(train: Train, context: Context) -> tuple[str, ...]:
    """Return the names of the parameters that are trained."""
    for name in train.trainable or ():
        check_name("Train.trainable", name, context.trainable)
    return context.trainable if train.trainable is None else train.trainable


def sent_names(train: Train, context: Context) -> tuple[str, ...]:
    """Return the names of the parameters that are trained and travel: all but the private ones."""
    trained = trained_names(train, context)
    for name in train.private:
        check_name("Train.private", name, trained)
    return tuple(name for name in trained if name not in train.private)
