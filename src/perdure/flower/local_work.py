"""Training of one client on a node, and what comes of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from perdure.contract.context import Client
from perdure.contract.local_training import LocalTraining
from perdure.contract.uploads import ClientResult, Field
from perdure.core.trees import Tensors
from perdure.engines.serial import SerialEngine


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
    """Train one client with the serial engine."""
    new_states: dict[int, tuple[Any, Tensors]] = {}

    def keep(number: int, state: Any, private: Tensors) -> None:
        new_states[number] = (state, private)

    (uploads,) = SerialEngine().train(training, [client], keep)
    state, private = new_states.get(client.id, (None, {}))
    fields = {name: without_client_axis(field) for name, field in uploads.fields.items()}
    _, loss = training.losses[client.id]
    return FinishedWork(ClientResult(fields, state), private, loss)


def without_client_axis(field: Field) -> Field:
    """Return a field of a stack of one client, without the client axis."""
    return replace(field, value={name: tensor[0] for name, tensor in field.value.items()})
