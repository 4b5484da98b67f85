"""Small runs that the tests of the prompt methods share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from perdure.contract import Batch, Client, Prepared
from perdure.core.trees import Tensors
from perdure.models.prompts import Prompted
from perdure.training.experiment import Experiment
from perdure.training.local_training import LocalTraining
from perdure.training.loop import begin_task
from perdure.training.round import TrainingRound, train_round
from perdure.training.state import RunState

SMALL: dict[str, Any] = {
    "data": {"limit": 120},
    "stream": {"kind": "split", "tasks": 2, "classes_per_task": 3},
    "clients": {"count": 3, "partition": {"kind": "classes", "fraction": 0.6}},
    "model": {"kind": "vit", "init": "random", "width": 8, "heads": 2, "depth": 5, "patch": 4},
    "train": {"rounds": 2, "optimizer": "adam", "lr": 0.02, "batch_size": 32, "max_steps": 2},
    "engine": {"kind": "serial"},
}

DIGITS: dict[str, Any] = {
    "data": {"source": "digits", "limit": 400, "test_limit": 200},
    "stream": {"kind": "split", "tasks": 5},
    "clients": {"count": 4, "partition": {"kind": "dirichlet", "alpha": 0.5}},
    "model": {"kind": "vit"},
    "train": {"rounds": 1, "max_steps": 1, "batch_size": 16, "lr": 0.002, "optimizer": "adam"},
    "seed": 100,
}
"""Two digits per task on the bundled transformer."""


def small(method: dict[str, Any], **sections: Any) -> dict[str, Any]:
    """Return a small config; a section replaces the keys that it names, or all for another kind."""
    values: dict[str, Any] = {**SMALL, "method": method}
    for name, section in sections.items():
        values[name] = merged_section(values.get(name, {}), section)
    return values


def merged_section(default: Any, section: Any) -> Any:
    """Return a section with defaults for the keys that it lacks, unless its kind is another."""
    if not isinstance(section, dict) or section.get("kind", default.get("kind")) != default.get(
        "kind"
    ):
        return section
    return {**default, **section}


def body(experiment: Experiment) -> Prompted:
    """Return the prompted body of a run."""
    assert isinstance(experiment.network.body, Prompted)
    return experiment.network.body


def begun(experiment: Experiment, rounds: int = 0) -> RunState:
    """Return the state in the first task, after some rounds of it."""
    state = experiment.initial_state()
    begin_task(experiment, state)
    for _ in range(rounds):
        train_round(experiment, state)
    return state


def clients_of(experiment: Experiment, state: RunState) -> list[Client]:
    """Return three clients as they are in the next round."""
    round_ = TrainingRound(experiment, state)
    round_.broadcast([])
    return [round_.client(number) for number in range(3)]


def prepared(experiment: Experiment, client: Client) -> Prepared:
    """Return what a client prepares for a round."""
    return local_training(experiment, client).prepare_client(client)


def step_loss(
    experiment: Experiment,
    client: Client,
    batch: Batch,
    tensors: Tensors | None = None,
    params: Tensors | None = None,
) -> Tensor:
    """Return the loss of a local step, as the engine takes it.

    `tensors`, `params`: in place of those that the client prepares and has.
    """
    local = local_training(experiment, client)
    own = local.prepare_client(client).tensors if tensors is None else tensors
    at = client.params if params is None else params
    key = torch.zeros((), dtype=torch.int64)
    return local.loss(at, {}, batch, key, client.broadcast, Prepared(tensors=own))[0]


def local_training(experiment: Experiment, client: Client) -> LocalTraining:
    """Return the local training of a client's round."""
    context = client.context
    train = experiment.plan_task(context.task, client.params).exchanges.train
    return LocalTraining(
        train, context, experiment.config.train, client.params, client.buffers, client.broadcast
    )
