"""What an engine is, and what engines have in common that hold the data of all clients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from perdure.config import Config
from perdure.contract.checks import refuse
from perdure.contract.context import Client
from perdure.contract.exchanges import Exchange
from perdure.contract.uploads import ClientResult
from perdure.data.tasks import Stream, Task
from perdure.engines.local_training import Keep, LocalTraining, check_fields
from perdure.federation.evaluation import Judge, Scores, mean_scores
from perdure.federation.messages import Answers, Failure, Sealed
from perdure.trees import Tree

Done = ClientResult | Sealed | Failure


class Engine(Protocol):
    """Runs everything that is done with clients' data: training, other exchanges, evaluation."""

    @property
    def name(self) -> str:
        """Its kind, as result.json says it."""
        ...

    def stream(self, config: Config) -> Stream | None:
        """Return the stream where only clients hold its data; None: this process reads it."""
        ...

    def train(
        self, work: LocalTraining, clients: list[Client], keep: Keep
    ) -> Iterator[Answers | Sealed | Failure]:
        """Train every client and yield the uploads in the order of `clients`.

        `keep(client, state, private)` is called for each client that has something new to keep.
        """
        ...

    def exchange(
        self, exchange: Exchange, per_client_fields: tuple[str, ...], clients: Iterable[Client]
    ) -> Iterator[tuple[Client, Done]]:
        """Do the work of an exchange other than training on every client, in their order."""
        ...

    def score(self, judges: list[Judge], tasks: list[Task]) -> list[Scores]:
        """Return the accuracy on the test data of some tasks, the mean over these models."""
        ...

    def choice(self) -> Tree:
        """Return what it found out on the way that a resumed run needs to go on alike."""
        ...

    def restore(self, choice: Tree) -> None:
        """Take up the choice of an earlier process."""
        ...


class Local:
    """What engines have in common that hold the data of all clients themselves."""

    def stream(self, config: Config) -> Stream | None:
        """Return None: read what the config names."""
        return None

    def exchange(
        self, exchange: Exchange, per_client_fields: tuple[str, ...], clients: Iterable[Client]
    ) -> Iterator[tuple[Client, Done]]:
        """Do the work of one client after another; `clients` may be made one by one."""
        for client in clients:
            yield client, client_work(exchange, per_client_fields, client)

    def score(self, judges: list[Judge], tasks: list[Task]) -> list[Scores]:
        """Return the accuracy task by task."""
        return [mean_scores(judges, task) for task in tasks]

    def choice(self) -> Tree:
        """Return nothing."""
        return {}

    def restore(self, choice: Tree) -> None:
        """Do nothing: there is nothing to take up."""


def client_work(
    exchange: Exchange, per_client_fields: tuple[str, ...], client: Client
) -> ClientResult:
    """Return what one client sends in an exchange and its new state, checked."""
    if exchange.client_work is None:
        return ClientResult()
    result, where = exchange.client_work(client), f"exchange {exchange.name!r}"
    if not isinstance(result, ClientResult):
        refuse(where, f"a {type(result).__name__} from client_work", "ClientResult")
    if result.fields and exchange.aggregate is None:
        fields = f"the fields {sorted(result.fields)}"
        refuse(where, fields, "none, since it has no aggregate that would take them")
    check_fields(where, result.fields, per_client_fields)
    return result
