"""The one loop over tasks and rounds. No method and no engine has another one.

A task is its opening exchanges, its training rounds, its task-end exchanges, and an evaluation on
all tasks so far. Task-end exchanges that are deferred run when the next task begins.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from perdure.core.event_log import Event
from perdure.training.events import EventCallback, measure, task_event, warn_small_clients
from perdure.training.exchange import run_exchange
from perdure.training.experiment import Experiment
from perdure.training.round import train_round
from perdure.training.state import RunState, check_server


def run_stream(
    experiment: Experiment,
    state: RunState,
    after: EventCallback,
    during: EventCallback | None = None,
) -> RunState:
    """Train from `state` to the end of the stream."""
    while state.task < experiment.task_count:
        if state.round == 0:
            begin_task(experiment, state)
        while state.round < experiment.plan(state).rounds:
            with timed(state, "train"):
                event = train_round(experiment, state, during)
            after(state, event)
        end_task(experiment, state)
        event = evaluate(experiment, state)
        next_task(state)
        after(state, event)
    return state


def begin_task(experiment: Experiment, state: RunState) -> None:
    """Start a task: run what the last one deferred, add outputs, run the opening exchanges."""
    with timed(state, "consolidate"):
        delivered = state.ledger.delivered
        state.ledger.begin_task()
        if state.task:
            run_deferred(experiment, state, delivered)
        server, state.sent_once = state.server, {}
        grown = replace(server, params=experiment.grow(server.params, state.task))
        state.server = check_server(experiment.method, server, grown, where="wrap_network")
        warn_small_clients(experiment, state)
        for position, exchange in experiment.exchanges(state).with_positions(ending=False):
            run_exchange(experiment, state, exchange, position)


def run_deferred(experiment: Experiment, state: RunState, delivered: dict[str, list[int]]) -> None:
    """Run the deferred exchanges of the task before, as at its end."""
    before = replace(state, task=state.task - 1)
    before.round = experiment.plan(before).rounds
    state.ledger.delivered = delivered
    for position, exchange in experiment.exchanges(before).with_positions(ending=True):
        if exchange.deferred:
            run_exchange(experiment, before, exchange, position)
    state.server, state.ledger.delivered = before.server, {}


def end_task(experiment: Experiment, state: RunState) -> None:
    """Run the task-end exchanges but deferred ones, and close the task's counts of bytes."""
    with timed(state, "consolidate"):
        for position, exchange in experiment.exchanges(state).with_positions(ending=True):
            if not exchange.deferred:
                run_exchange(experiment, state, exchange, position)
    stored = experiment.store.sizes() if experiment.privacy.simulated else None
    state.ledger.end_task(stored, experiment.config_at(state.task).clients.count)


def evaluate(experiment: Experiment, state: RunState) -> Event:
    """Add the accuracies on all tasks so far to the matrices of `state` and return the event."""
    with timed(state, "evaluate"):
        tasks = [experiment.task(index) for index in range(state.task + 1)]
        evaluations = measure(experiment, state, tasks, scores=True)
        state.add_evaluations(evaluations, experiment.task_count)
        if experiment.config.data.validation:
            held_out = [task.on_validation() for task in tasks]
            state.add_validation(measure(experiment, state, held_out), experiment.task_count)
        return task_event(experiment, state)


def next_task(state: RunState) -> None:
    """Move `state` to the first round of the next task."""
    state.task_end_seconds.append(state.seconds["total"])
    state.task, state.round = state.task + 1, 0


@contextmanager
def timed(state: RunState, part: str) -> Iterator[None]:
    """Add the seconds of the enclosed block to `state.seconds[part]` and to the total."""
    start = time.perf_counter()
    try:
        yield
    finally:
        seconds = time.perf_counter() - start
        state.seconds[part] += seconds
        state.seconds["total"] += seconds
