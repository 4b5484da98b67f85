"""Small runs that the tests of the subspace methods share."""

from __future__ import annotations

from typing import Any

import torch
from prompt_runs import merged_section

from perdure.config import parse
from perdure.contract import Client
from perdure.core.event_log import Event
from perdure.core.trees import Tensors, subtract
from perdure.training.engines.serial import train_client
from perdure.training.experiment import Experiment, build_experiment
from perdure.training.local_training import LocalTraining
from perdure.training.loop import begin_task, end_task, evaluate
from perdure.training.round import train_round
from perdure.training.state import RunState

SMALL: dict[str, Any] = {
    "data": {"limit": 120},
    "stream": {"tasks": 3},
    "clients": {"count": 4, "partition": {"kind": "dirichlet", "alpha": 0.5}},
    "model": {"kind": "mlp", "hidden": [30, 20]},
    "train": {"rounds": 2, "local_epochs": 1, "batch_size": 16, "lr": 0.05},
    "engine": {"kind": "serial"},
}


def experiment_of(method: dict[str, Any], **sections: Any) -> Experiment:
    """Return a small experiment; a section replaces the keys that it names, or all of them."""
    values: dict[str, Any] = {**SMALL, "method": method}
    for name, section in sections.items():
        values[name] = merged_section(values.get(name, {}), section)
    return build_experiment(parse(values))


def train_task(experiment: Experiment, state: RunState, ended: bool = True) -> Event:
    """Train one task of the stream as the training loop does, and evaluate."""
    begin_task(experiment, state)
    while state.round < experiment.plan(state).rounds:
        train_round(experiment, state)
    if ended:
        end_task(experiment, state)
    return evaluate(experiment, state)


def next_task(state: RunState) -> None:
    """Advance the state to the next task."""
    state.task, state.round = state.task + 1, 0


def second_task(method: dict[str, Any], **sections: Any) -> tuple[Experiment, RunState]:
    """Return an experiment and its state at the start of the second task."""
    experiment = experiment_of(method, **sections)
    state = experiment.initial_state()
    train_task(experiment, state)
    next_task(state)
    begin_task(experiment, state)
    return experiment, state


def clients_of(experiment: Experiment, state: RunState, broadcast: dict[str, Any]) -> list[Client]:
    """All clients as a method sees them now."""
    context = experiment.context(state)
    there = range(experiment.config.clients.count)
    everything = {"params": state.server.params, **broadcast}
    return [experiment.client(number, context, state.server, everything) for number in there]


def training_of(
    experiment: Experiment, state: RunState, broadcast: dict[str, Any]
) -> LocalTraining:
    """What all clients of a training round have in common now."""
    train, server = experiment.exchanges(state).train, state.server
    return LocalTraining(
        train, experiment.context(state), experiment.config.train, server.params, server.buffers,
        {"params": server.params, **broadcast},
    )  # fmt: skip


def local_change(
    experiment: Experiment, state: RunState, client: Client, broadcast: dict[str, Any]
) -> Tensors:
    """What one client's local steps change."""
    training = training_of(experiment, state, broadcast)
    return subtract(train_client(training, client)[0], client.params)


def interference(change: Tensors, spaces: dict[str, Tensors]) -> float:
    """Return ||D O|| / ||D|| over the protected layers: 0 if no protected input is disturbed."""
    inside, whole = 0.0, 0.0
    for name, space in spaces.items():
        if name in change:
            value = change[name].double().flatten(1)
            ((form, matrix),) = space.items()
            onto = matrix.double() @ matrix.double().T
            onto = onto if form == "basis" else torch.eye(len(onto)).double() - onto
            inside += float((value @ onto).square().sum())
            whole += float(value.square().sum())
    return float((inside / max(whole, 1e-300)) ** 0.5)
