"""What all sides of a federation with data of its own agree on: classes, shape, normalisation.

The server holds no data and nodes must not open that of later tasks, so all of it is in the config.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from perdure.config import Config, FederationConfig, FlowerEngineConfig
from perdure.core.errors import UserError
from perdure.data.inputs import Inputs, make_inputs
from perdure.data.source import Array
from perdure.data.streams import Stream, Task, resolve_normalization
from perdure.data.streams.stream import LazyTasks


def node_count(config: Config) -> int:
    """Nodes of a run: as many as clients, unless a trial puts several clients on one."""
    if config.federation is not None:
        return config.clients.count
    nodes = config.engine.nodes if isinstance(config.engine, FlowerEngineConfig) else None
    return nodes or config.clients.count


def reply_timeout(config: Config) -> float:
    """Return the seconds to wait for a node's reply."""
    engine = config.engine if isinstance(config.engine, FlowerEngineConfig) else None
    return (engine or FlowerEngineConfig()).timeout


def agreement(config: Config) -> FederationConfig:
    """The federation section, checked against the rest of the config."""
    agreed, kind = config.federation, config.stream.kind
    assert agreed is not None
    if kind not in ("split", "domains"):
        raise UserError(f"stream.kind: must be split, domains with federation, got {kind!r}")
    if config.data.normalize is not False and not (config.data.mean and config.data.std):
        raise UserError(
            "data.mean: got None, allowed with federation: data.mean and data.std of each channel, "
            "or data.normalize false, since nobody sees all data"
        )
    if agreed.tasks is not None and len(agreed.tasks) != config.stream.tasks:
        allowed = f"one list of classes for each of the {config.stream.tasks} tasks"
        raise UserError(f"federation.tasks: must be {allowed}, got {len(agreed.tasks)} lists")
    return agreed


def task_classes(config: Config) -> tuple[tuple[int, ...], ...]:
    """The labels of each task, as numbers."""
    agreed = agreement(config)
    everything = tuple(range(len(agreed.classes)))
    if agreed.tasks is None:
        return (everything,) * config.stream.tasks
    numbers = {name: number for number, name in enumerate(agreed.classes)}
    for names in agreed.tasks:
        for name in names:
            if name not in numbers:
                known = ", ".join(agreed.classes)
                raise UserError(f"federation.tasks: must be {known}, got {name!r}")
    return tuple(tuple(sorted(numbers[name] for name in names)) for names in agreed.tasks)


def blank_inputs(config: Config) -> Inputs:
    """No rows, but the shape and the normalisation of all."""
    row = torch.zeros(1, *agreement(config).shape, dtype=torch.uint8)
    first, _ = make_inputs(row, row, config.data, "data")
    return first


@dataclass(frozen=True)
class NodePartition:
    """How many rows each client holds; which ones they are is its own affair."""

    ask: Callable[[], Array]

    @property
    def sizes(self) -> Array:
        """Rows of each client."""
        return self.ask()

    def index(self, client: int) -> Tensor:
        """As many row numbers as the client holds rows (all the same: there is no row to see)."""
        return torch.zeros(1, dtype=torch.int64).expand(int(self.sizes[client]))

    def counts(self, labels: Array, classes: int) -> Array:
        """Unknown: nobody tells."""
        raise UserError("the labels that clients hold are not known in a federation")


def remote_stream(config: Config, sizes: Callable[[int], Array]) -> Stream:
    """The stream as the server sees it: who holds how much of the current task, and no data."""
    config = resolve_normalization(config)
    agreed, classes = agreement(config), task_classes(config)
    inputs, none = blank_inputs(config), torch.zeros(0, dtype=torch.int64)

    def make(number: int) -> Task:
        held = NodePartition(lambda: sizes(number))
        name = f"task {number + 1}"
        return Task(number, name, classes[number], inputs, none, inputs, none, held, ())

    tasks = LazyTasks(config.stream.tasks, make)
    shape = tuple(agreed.shape)
    return Stream(config.stream.kind, tasks, tuple(agreed.classes), shape, classes)
