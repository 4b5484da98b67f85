"""The protocol of an engine, and the base of those that simulate all clients in this process."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Iterable, Iterator
from typing import Protocol

from perdure.config import Config
from perdure.contract.context import Client
from perdure.contract.exchanges import Exchange
from perdure.contract.uploads import ClientResult, FailedUpload, MaskedUpload, StackedUploads
from perdure.core.errors import refuse, type_name
from perdure.core.trees import Tree
from perdure.data.streams.stream import Stream, Task
from perdure.evaluation.evaluator import Evaluation, Evaluator, mean_evaluation
from perdure.training.local_training import LocalTraining, SaveClient, check_fields

# ---- The protocol of an engine, which runs everything that uses clients' data

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
        """Train every client and yield the uploads in the order of `clients`."""
        ...

    def exchange(
        self, exchange: Exchange, per_client_fields: tuple[str, ...], clients: Iterable[Client]
    ) -> Iterator[tuple[Client, ExchangeResult]]:
        """Run the client work of an exchange other than training, in the order of `clients`."""
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


# ---- Make malloc reuse freed memory instead of returning it to the operating system
#
# A step of stacked clients allocates and frees tensors of several megabytes. By default glibc
# returns blocks of that size to the kernel, which then clears every page of the next block; for a
# wide MLP this took a quarter of the training time. Blocks of up to 32 MB, the largest size that
# glibc accepts, are reused instead.

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Option numbers of glibc's malloc.h."""
_MAX_BLOCK_BYTES, _MAX_FREE_BYTES = 32 << 20, (1 << 31) - 1


@functools.cache
def keep_freed_memory() -> bool:
    """Set malloc's thresholds once per process; return whether this platform supports it."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _MAX_BLOCK_BYTES)) and bool(
        mallopt(_TRIM_THRESHOLD, _MAX_FREE_BYTES)
    )


# ---- Base class of the engines that simulate all clients in this process


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
