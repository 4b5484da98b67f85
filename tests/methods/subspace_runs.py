"""Small runs that the tests of the subspace methods share."""

from __future__ import annotations

from typing import Any

from perdure.config import parse
from perdure.federation.experiment import Experiment, prepare
from perdure.federation.loop import Event, begin_task, consolidate, evaluate, train_round
from perdure.federation.state import State
from perdure.methods.base import Client

SMALL: dict[str, Any] = {
    "data": {"limit": 120},
    "stream": {"tasks": 3},
    "clients": {"count": 4, "partition": {"kind": "dirichlet", "alpha": 0.5}},
    "model": {"kind": "mlp", "hidden": [30, 20]},
    "train": {"rounds": 2, "local_epochs": 1, "batch_size": 16, "lr": 0.05},
    "engine": {"kind": "serial"},
}


def experiment_of(method: dict[str, Any], **sections: Any) -> Experiment:
    """A small experiment; a section given replaces the keys that it names."""
    values: dict[str, Any] = {**SMALL, "method": method}
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section} if isinstance(section, dict) else section
    return prepare(parse(values))


def train_task(experiment: Experiment, state: State, consolidated: bool = True) -> Event:
    """One task of the stream, as the loop does it."""
    begin_task(experiment, state)
    while state.round < experiment.config.rounds(state.task):
        train_round(experiment, state)
    if consolidated:
        consolidate(experiment, state)
    return evaluate(experiment, state)


def next_task(state: State) -> None:
    """Turn to the next task."""
    state.task, state.round = state.task + 1, 0


def clients_of(experiment: Experiment, state: State, received: dict[str, Any]) -> list[Client]:
    """All clients as a method sees them now."""
    place = experiment.place(state)
    there = range(experiment.config.clients.count)
    everything = {"params": state.server.params, **received}
    return [experiment.client(number, place, state.server, everything) for number in there]
