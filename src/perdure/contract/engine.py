"""The protocol of an engine, which runs everything that uses clients' data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from perdure.config import Config
from perdure.contract.context import Client
from perdure.contract.evaluation import Evaluation, Evaluator
from perdure.contract.exchanges import Exchange
from perdure.contract.local_training import LocalTraining, SaveClient
from perdure.contract.upload_collector import FailedUpload, MaskedUpload, StackedUploads
from perdure.contract.uploads import ClientResult
from perdure.core.trees import Tree
from perdure.data.streams.stream import Stream, Task

ExchangeResult = ClientResult | MaskedUpload | FailedUpload
"""What one client returns in an exchange other than training."""


class Engine(Protocol):
    """Runs everything that uses clients' data: training, other exchanges and evaluation."""

    @property
    def name(self) -> str:
        """The kind of engine, as recorded in result.json."""
        ...

    @property
    def in_process(self) -> bool:
        """Whether clients are simulated in this process."""
        ...

    def stream(self, config: Config) -> Stream | None:
        """Return the stream if only the nodes hold its data.

        If None, this process reads the data that the config names.
        """
        ...

    def train(
        self, training: LocalTraining, clients: list[Client], save_client: SaveClient
    ) -> Iterator[StackedUploads | MaskedUpload | FailedUpload]:
        """Train every client and yield the uploads in the order of `clients`.

        Args:
            training: What all clients of the round share.
            clients: The sampled clients.
            save_client: Called for each client with a new state or private parameters.
        """
        ...

    def exchange(
        self, exchange: Exchange, per_client_fields: tuple[str, ...], clients: Iterable[Client]
    ) -> Iterator[tuple[Client, ExchangeResult]]:
        """Run the client work of an exchange other than training, in the order of `clients`.

        Args:
            exchange: The exchange.
            per_client_fields: Names of the fields that may be an Each.
            clients: The participants; they may be created one by one.
        """
        ...

    def evaluate(self, evaluators: list[Evaluator], tasks: list[Task]) -> list[Evaluation]:
        """Return the accuracy on the test data of each task, averaged over the models."""
        ...

    def choice(self) -> Tree:
        """Return the engine's own decisions, which a resumed run must repeat."""
        ...

    def restore(self, choice: Tree) -> None:
        """Repeat the decisions that `choice` returned in an earlier process."""
        ...
