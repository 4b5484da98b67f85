"""The one loop over tasks and rounds. No method and no engine has a loop of its own.

broadcast -> local training -> aggregation, round after round; at a task's end consolidation (where
the method asks for it) and evaluation on all tasks so far.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from perdure.engines.work import Job
from perdure.errors import RunError
from perdure.federation.evaluation import Judge
from perdure.federation.experiment import Experiment
from perdure.federation.messages import Answers, Failure, Sealed, Tally, single
from perdure.federation.sampling import holders, reporting, sample
from perdure.federation.state import State
from perdure.methods.base import Place, Server
from perdure.privacy.account import spent
from perdure.trees import Tree, as_read

log = logging.getLogger(__name__)
Event = dict[str, Any]
After = Callable[[State, Event], None]


def run_stream(
    experiment: Experiment, state: State, after: After, during: After | None = None
) -> State:
    """Go on from `state` to the end of the stream.

    `after` is told of each round and task end, `during` of clients that report within a round.
    """
    while state.task < experiment.tasks:
        if state.round == 0:
            begin_task(experiment, state)
        while state.round < experiment.config.rounds(state.task):
            with timed(state, "train"):
                event = train_round(experiment, state, during)
            after(state, event)
        with timed(state, "consolidate"):
            consolidate(experiment, state)
        with timed(state, "evaluate"):
            event = evaluate(experiment, state)
        state.ends.append(state.seconds["total"])
        state.task, state.round = state.task + 1, 0
        after(state, event)
    return state


def begin_task(experiment: Experiment, state: State) -> None:
    """A task arrives: the head grows, the method prepares."""
    place, server = experiment.place(state), state.server
    params = experiment.grow(server.params, state.task)
    state.server = _lasting(experiment.method.begin_task(replace(server, params=params), place))
    state.ledger.begin_task()


def train_round(experiment: Experiment, state: State, during: After | None = None) -> Event:
    """One round: sample, broadcast, train, aggregate."""
    place = experiment.place(state)
    sampled, tally = gather(experiment, state, place, during)
    while tally.lost:
        place = replace(place, attempt=place.attempt + 1)
        sampled, tally = gather(experiment, state, place, during)
    if place.attempt:
        state.counts.repeated.append(
            {"task": place.task, "round": place.round, "attempt": place.attempt}
        )
    if close(tally, state, place):
        closed = replace(place, attendance=len(tally.report.clients) / len(sampled))
        state.server = _lasting(experiment.method.aggregate(state.server, tally.report, closed))
    state.counts.rounds += 1
    state.counts.client_updates += len(tally.report.clients)
    state.round += 1
    return _round_event(experiment, state, place, sampled, tally)


def gather(
    experiment: Experiment, state: State, place: Place, during: After | None = None
) -> tuple[list[int], Tally]:
    """Sample clients and let them train: who was sampled, and what they sent."""
    sampled = sample(experiment.config, experiment.task(state.task), place)
    clients = reporting(experiment.config, sampled, place)
    received = broadcast(experiment, state, place, sampled)
    tally = experiment.privacy.tally(place, sampled, state.ledger)
    kept: dict[int, Tree] = {}
    if clients:
        job = Job(
            experiment.method, place, experiment.config.train,
            state.server.params, state.server.buffers, received,
        )  # fmt: skip
        work = [experiment.client(client, place, state.server, received) for client in clients]
        for answers in experiment.engine.train(job, work, kept.__setitem__):
            tally.add(answers)
            if during is not None:
                during(state, _clients_event(place, answers, len(sampled)))
    else:
        log.warning(
            "task %d round %d: none of the clients reports, the model stays as it is",
            place.task + 1, place.round + 1,
        )  # fmt: skip
    tally.close()
    keep(experiment, kept, tally)
    state.counts.missing += len(sampled) - len(clients) + silent(tally)
    return sampled, tally


def broadcast(experiment: Experiment, state: State, place: Place, clients: list[int]) -> Tree:
    """What the clients of a round receive, entered in the ledger."""
    method, server, ledger = experiment.method, state.server, state.ledger
    trained = set(method.trainable(server.params, place))
    fresh = {name: value for name, value in server.params.items() if name in trained}
    still = {name: value for name, value in server.params.items() if name not in trained}
    extra, lasting = method.broadcast(server, place), method.broadcast_lasting(server, place)
    ledger.send("params", fresh, clients, lasting=False)
    ledger.send("frozen", still, clients, lasting=True)
    ledger.send("buffers", server.buffers, clients, lasting=False)
    for name, value in extra.items():
        ledger.send(name, {name: value}, clients, lasting=False)
    for name, value in lasting.items():
        ledger.send(name, {name: value}, clients, lasting=True)
    return {"params": server.params, **lasting, **extra}


def keep(experiment: Experiment, kept: dict[int, Tree], tally: Tally) -> None:
    """Store what clients keep. Who sent something not finite goes on with what it had before."""
    for client, tree in kept.items():
        if client not in tally.rejected and not tally.lost:
            experiment.store.put(client, tree)
    kept.clear()


def close(tally: Tally, state: State, place: Place) -> bool:
    """Whether there is something to aggregate; name the uploads that were left out."""
    at = {"task": place.task, "round": place.round}
    for failure in tally.failures:
        log.warning(
            "task %d round %d: client %d is left out: %s",
            place.task + 1, place.round + 1, failure.client, failure.reason,
        )  # fmt: skip
        state.counts.failures.append({**at, "client": failure.client, "reason": failure.reason})
    for client in tally.rejected:
        log.warning(
            "task %d round %d: the update of client %d is not finite and was left out",
            place.task + 1, place.round + 1, client,
        )  # fmt: skip
        state.counts.rejected.append({**at, "client": client})
    if tally.rejected and not tally.report.clients:
        raise RunError(
            f"task {place.task + 1} round {place.round + 1}: no client's update is finite; "
            "the run stops at its last checkpoint (a new run with a smaller train.lr may help)"
        )
    if tally.failures and not (tally.report.clients or tally.idle):
        raise RunError(
            f"task {place.task + 1} round {place.round + 1}: no client gave an answer that can be "
            "used; the run stops at its last checkpoint"
        )
    return bool(tally.report.clients)


def silent(tally: Tally) -> int:
    """Clients that were asked and never answered."""
    return sum(not failure.answered for failure in tally.failures)


def consolidate(experiment: Experiment, state: State) -> None:
    """The extra rounds at a task's end over all clients that hold data."""
    clients = holders(experiment.task(state.task))
    for extra in range(experiment.method.consolidates(experiment.place(state))):
        place = replace(experiment.place(state), extra=extra)
        alone = experiment.method.consolidates_alone()
        received = broadcast(experiment, state, place, [] if alone else clients)
        tally = _extract(experiment, state, place, clients, received)
        while tally.lost:
            place = replace(place, attempt=place.attempt + 1)
            tally = _extract(experiment, state, place, clients, received)
        close(tally, state, place)
        state.server = _lasting(experiment.method.absorb(state.server, tally.report, place))


def _lasting(server: Server) -> Server:
    """The server as a checkpoint would bring it back, for a resumed run to have the very same."""
    return Server(as_read(server.params), as_read(server.buffers), as_read(server.memory))


def _extract(
    experiment: Experiment, state: State, place: Place, clients: list[int], received: Tree
) -> Tally:
    senders = [] if experiment.method.consolidates_alone() else clients
    tally = experiment.privacy.tally(place, senders, state.ledger)
    kept: dict[int, Tree] = {}
    work = (experiment.client(number, place, state.server, received) for number in clients)
    for client, done in experiment.engine.extract(experiment.method, work):
        if isinstance(done, Failure | Sealed):
            tally.add(done)
            continue
        if done.upload:
            tally.add(single(client.id, client.weight, done.upload))
        else:
            tally.idle += 1
        if done.kept is not None:
            kept[client.id] = done.kept
        if tally.settles_at_once:  # what clients keep need not pile up
            keep(experiment, kept, tally)
    tally.close()
    keep(experiment, kept, tally)
    return tally


def evaluate(experiment: Experiment, state: State) -> Event:
    """Accuracy on every task so far: one row of each matrix."""
    judge = Judge(experiment.method, state.server, experiment.network, state.task)
    scores = experiment.engine.score(judge, [experiment.task(j) for j in range(state.task + 1)])
    later: list[float | None] = [None] * (experiment.tasks - len(scores))
    for mode, rows in state.matrix.items():
        rows.append([score.accuracy[mode] for score in scores] + later)
    state.routing.append([score.routing for score in scores] + later)
    told = [score.told for score in scores if score.told is not None]
    state.confusion = told or None
    return {
        "event": "task",
        "task": state.task,
        "accuracy": {mode: rows[-1] for mode, rows in state.matrix.items()},
        "routing": state.routing[-1],
        "bytes": dict(state.ledger.by_task[-1]),
        **_diagnosis(experiment, state.server, experiment.place(state)),
        **_privacy(experiment, state),
    }


def _clients_event(place: Place, answers: Answers | Sealed | Failure, sampled: int) -> Event:
    done = len(answers.clients) if isinstance(answers, Answers) else 1
    at = {"task": place.task, "round": place.round, "attempt": place.attempt}
    return {"event": "clients", **at, "done": done, "sampled": sampled}


def _round_event(
    experiment: Experiment, state: State, place: Place, sampled: list[int], tally: Tally
) -> Event:
    event: Event = {
        "event": "round",
        "task": place.task,
        "round": place.round,
        "lr": place.lr,
        "sampled": len(sampled),
        "clients": len(tally.report.clients),
        "rejected": tally.rejected,
        **({"failed": [failure.client for failure in tally.failures]} if tally.failures else {}),
        "bytes": dict(state.ledger.by_task[-1]),
        **_diagnosis(experiment, state.server, place),
    }
    every = experiment.config.runs.evaluate_every
    if every and state.round % every == 0:
        judge = Judge(experiment.method, state.server, experiment.network, place.task)
        (score,) = experiment.engine.score(judge, [experiment.task(place.task)])
        event["accuracy"] = score.accuracy
    return event


def _privacy(experiment: Experiment, state: State) -> Event:
    found = spent(experiment, state)
    return {"privacy": found} if found else {}


def _diagnosis(experiment: Experiment, server: Server, place: Place) -> Event:
    found = experiment.method.diagnose(server, place)
    return {"method": found} if found else {}


@contextmanager
def timed(state: State, part: str) -> Iterator[None]:
    """Add the seconds of a block to a part and to the total."""
    start = time.perf_counter()
    try:
        yield
    finally:
        spent = time.perf_counter() - start
        state.seconds[part] += spent
        state.seconds["total"] += spent
