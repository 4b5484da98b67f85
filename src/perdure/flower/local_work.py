"""Training of one client on a node, and what comes of it."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import Any

from perdure.contract.context import Client
from perdure.contract.local_training import LocalTraining
from perdure.contract.uploads import ClientResult, Field
from perdure.core.trees import Tensors
from perdure.data.partition import small_clients
from perdure.data.streams.stream import Task
from perdure.engines.serial import SerialEngine

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FinishedWork:
    """What one client's work in an exchange gave."""

    result: ClientResult
    """Its fields and new state."""
    private: Tensors = field(default_factory=dict)
    """Its private parameters."""
    loss: float | None = None
    """Its mean training loss over the local steps. If None, it did not train."""


def train_alone(training: LocalTraining, client: Client) -> FinishedWork:
    """Train one client with the serial engine; one with too few rows does and sends nothing."""
    if client.is_too_small:
        return FinishedWork(ClientResult())
    new_states: dict[int, tuple[Any, Tensors]] = {}

    def keep(number: int, state: Any, private: Tensors) -> None:
        new_states[number] = (state, private)

    (uploads,) = SerialEngine().train(training, [client], keep)
    state, private = new_states.get(client.id, (None, {}))
    fields = {name: without_client_axis(field) for name, field in uploads.fields.items()}
    _, loss = training.losses[client.id]
    return FinishedWork(ClientResult(fields, state), private, loss)


def announced_rows(task: Task, client: int, min_rows: int) -> int:
    """Return the rows of a task that a node announces: 0 if they are too few to send anything."""
    small = small_clients(task.partition)
    if client in small:
        log.warning(
            "task %d: nothing is sent about %d rows: at least %d are required (policy.min_rows of "
            "node.yaml, privacy.min_rows of the run)",
            task.index + 1, small[client], min_rows,
        )  # fmt: skip
    return int(task.partition.sizes[client])


def without_client_axis(field: Field) -> Field:
    """Return a field of a stack of one client, without the client axis."""
    return replace(field, value={name: tensor[0] for name, tensor in field.value.items()})
