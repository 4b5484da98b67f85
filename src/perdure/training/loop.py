"""The one loop over tasks and rounds. No method and no engine has a loop of its own.

A task is its opening exchanges, its training rounds, its task-end exchanges, and an evaluation on
all tasks so far.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from perdure.training.exchanging import as_saved, hold
from perdure.training.experiment import Experiment
from perdure.training.privacy_summary import privacy_spent
from perdure.training.rounds import After, Event, diagnostics, train_round
from perdure.training.state import RunState


def run_stream(
    experiment: Experiment, state: RunState, after: After, during: After | None = None
) -> RunState:
    """Go on from `state` to the end of the stream.

    `after` is called after every round and every task, `during` as uploads arrive within a round.
    """
    while state.task < experiment.tasks:
        if state.round == 0:
            with timed(state, "consolidate"):
                begin_task(experiment, state)
        while state.round < experiment.rounds(state):
            with timed(state, "train"):
                event = train_round(experiment, state, during)
            after(state, event)
        with timed(state, "consolidate"):
            end_task(experiment, state)
        with timed(state, "evaluate"):
            event = evaluate(experiment, state)
        state.task_end_seconds.append(state.seconds["total"])
        state.task, state.round = state.task + 1, 0
        after(state, event)
    return state


def begin_task(experiment: Experiment, state: RunState) -> None:
    """A task arrives: the network grows, the ledger opens, the opening exchanges are held."""
    server, state.once = state.server, {}
    grown = replace(server, params=experiment.grow(server.params, state.task))
    state.server = as_saved(experiment, server, grown, "wrap_network")
    state.ledger.begin_task()
    for position, exchange in experiment.exchanges(state).numbered(ending=False):
        hold(experiment, state, exchange, position)


def end_task(experiment: Experiment, state: RunState) -> None:
    """Hold the exchanges at a task's end."""
    for position, exchange in experiment.exchanges(state).numbered(ending=True):
        hold(experiment, state, exchange, position)


def evaluate(experiment: Experiment, state: RunState) -> Event:
    """Return the accuracy on every task so far, and enter it as one row of each matrix."""
    tasks = [experiment.task(number) for number in range(state.task + 1)]
    scores = experiment.engine.evaluate(experiment.evaluators(state), tasks)
    later: list[float | None] = [None] * (experiment.tasks - len(scores))
    for mode, rows in state.matrix.items():
        rows.append([score.accuracy[mode] for score in scores] + later)
    state.routing.append([score.routing for score in scores] + later)
    told = [score.predicted_tasks for score in scores if score.predicted_tasks is not None]
    state.confusion = told or None
    privacy = privacy_spent(experiment, state)
    return {
        "event": "task",
        "task": state.task,
        "accuracy": {mode: rows[-1] for mode, rows in state.matrix.items()},
        "routing": state.routing[-1],
        "bytes": dict(state.ledger.by_task[-1]),
        **diagnostics(experiment, state.server, experiment.context(state)),
        **({"privacy": privacy} if privacy else {}),
    }


@contextmanager
def timed(state: RunState, part: str) -> Iterator[None]:
    """Add the seconds of a block to a part and to the total."""
    start = time.perf_counter()
    try:
        yield
    finally:
        seconds = time.perf_counter() - start
        state.seconds[part] += seconds
        state.seconds["total"] += seconds
