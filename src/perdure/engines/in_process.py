"""Base class of the engines that simulate all clients in this process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from perdure.config import Config
from perdure.contract.checks import refuse, type_name
from perdure.contract.context import Client
from perdure.contract.engine import ExchangeResult
from perdure.contract.evaluation import Evaluation, Evaluator, mean_evaluation
from perdure.contract.exchanges import Exchange
from perdure.contract.local_training import check_fields
from perdure.contract.uploads import ClientResult
from perdure.core.trees import Tree
from perdure.data.streams.stream import Stream, Task


class InProcessEngine:
    """Base class of the engines that simulate all clients in this process."""

    in_process = True

    def stream(self, config: Config) -> Stream | None:
        """Return None: this process reads the data that the config names."""
        return None

    def exchange(
        self, exchange: Exchange, per_client_fields: tuple[str, ...], clients: Iterable[Client]
    ) -> Iterator[tuple[Client, ExchangeResult]]:
        """Run the client work of one client after another; `clients` may be a generator."""
        for client in clients:
            yield client, client_work(exchange, per_client_fields, client)

    def evaluate(self, evaluators: list[Evaluator], tasks: list[Task]) -> list[Evaluation]:
        """Return the accuracy on each task, averaged over the models."""
        return [mean_evaluation(evaluators, task) for task in tasks]

    def choice(self) -> Tree:
        """Return an empty dict: there is nothing to repeat."""
        return {}

    def restore(self, choice: Tree) -> None:
        """Do nothing: there is nothing to repeat."""


def client_work(
    exchange: Exchange, per_client_fields: tuple[str, ...], client: Client
) -> ClientResult:
    """Return the checked result of one client's work in an exchange.

    A client with too few rows of the task does no work of which anything would be sent.
    """
    if exchange.client_work is None or _is_withheld(exchange, client):
        return ClientResult()
    result, where = exchange.client_work(client), f"exchange {exchange.name!r}"
    if not isinstance(result, ClientResult):
        refuse(where, f"{type_name(result)} from client_work", "a ClientResult")
    if result.fields and exchange.aggregate is None:
        fields = f"the fields {sorted(result.fields)}"
        refuse(where, fields, "a result without fields, since the exchange has no aggregate")
    check_fields(where, result.fields, per_client_fields)
    return result


def _is_withheld(exchange: Exchange, client: Client) -> bool:
    """Return whether the client must not send anything about its rows of the task."""
    return exchange.communicates and exchange.participants == "all" and client.is_too_small
