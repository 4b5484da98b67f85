"""What an engine is: where everything that is done with clients' data runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from perdure.config import Config
from perdure.contract.context import Client
from perdure.contract.evaluation import Evaluation, Evaluator
from perdure.contract.exchanges import Exchange
from perdure.contract.local_training import Keep, LocalTraining
from perdure.contract.upload_collector import FailedUpload, MaskedUpload, StackedUploads
from perdure.contract.uploads import ClientResult
from perdure.core.trees import Tree
from perdure.data.streams.stream import Stream, Task

Done = ClientResult | MaskedUpload | FailedUpload


class Engine(Protocol):
    """Runs everything that is done with clients' data: training, other exchanges, evaluation."""

    @property
    def name(self) -> str:
        """Its kind, as result.json says it."""
        ...

    @property
    def in_process(self) -> bool:
        """Whether clients are simulated in this process."""
        ...

    def stream(self, config: Config) -> Stream | None:
        """Return the stream where only clients hold its data; None: this process reads it."""
        ...

    def train(
        self, training: LocalTraining, clients: list[Client], keep: Keep
    ) -> Iterator[StackedUploads | MaskedUpload | FailedUpload]:
        """Train every client and yield the uploads in the order of `clients`.

        `keep(client, state, private)` is called for each client that has something new to keep.
        """
        ...

    def exchange(
        self, exchange: Exchange, per_client_fields: tuple[str, ...], clients: Iterable[Client]
    ) -> Iterator[tuple[Client, Done]]:
        """Do the work of an exchange other than training on every client, in their order."""
        ...

    def evaluate(self, evaluators: list[Evaluator], tasks: list[Task]) -> list[Evaluation]:
        """Return the accuracy on the test data of some tasks, the mean over these models."""
        ...

    def choice(self) -> Tree:
        """Return what it found out on the way that a resumed run needs to go on alike."""
        ...

    def restore(self, choice: Tree) -> None:
        """Take up the choice of an earlier process."""
        ...
