"""The loop: aggregated and rejected uploads, the ledger, and events."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from perdure.config import parse
from perdure.contract import (
    Change,
    Client,
    ClientResult,
    CollectedUploads,
    Context,
    Exchange,
    LocalUpdate,
    Method,
    OncePerTask,
    Server,
    Sum,
    Train,
)
from perdure.core.errors import RunError
from perdure.core.trees import Tensors
from perdure.training.experiment import Experiment, build_experiment
from perdure.training.ledger import encode
from perdure.training.loop import begin_task, run_stream
from perdure.training.round import train_round
from perdure.training.sampling import clients_with_data
from perdure.training.state import RunState

VALUES: dict[str, Any] = {
    "data": {"limit": 90},
    "stream": {"kind": "split", "tasks": 2, "classes_per_task": 3},
    "clients": {"count": 5},
    "model": {"hidden": [6]},
    "train": {"rounds": 2, "batch_size": 16},
    "engine": {"kind": "serial"},
}


@dataclass(frozen=True)
class Witness(Method):
    """FedAvg that writes down every update; some clients send what is not finite."""

    bad: tuple[int, ...] = ()
    seen: ClassVar[list[tuple[Client, Tensors]]] = []
    counted: ClassVar[list[CollectedUploads]] = []

    def exchanges(self, context: Context) -> list[Exchange | Train]:
        return [Train(make_upload=self.upload, adjust=self.note)]

    def upload(self, client: Client, local: LocalUpdate) -> ClientResult:
        update = local.update
        self.seen.append((client, update))
        if client.id in self.bad:
            update = update | {"fc1.bias": update["fc1.bias"] * float("nan")}
        return ClientResult({"update": Sum(update)})

    def note(
        self, server: Server, change: Change, uploads: CollectedUploads, context: Context
    ) -> Change:
        self.counted.append(uploads)
        return change


@pytest.fixture(autouse=True)
def _nothing_seen_yet() -> None:
    Witness.seen.clear()
    Witness.counted.clear()


def witnessed(bad: tuple[int, ...] = (), **changes: Any) -> Experiment:
    method = {"kind": f"{__name__}.Witness", "bad": list(bad)}
    return build_experiment(parse({**VALUES, "method": method, **changes}))


def one_round(experiment: Experiment) -> tuple[RunState, Tensors, Any]:
    """The state after the first round, the model before it, and the event."""
    state = experiment.initial_state()
    before = state.server.params
    begin_task(experiment, state)
    return state, before, train_round(experiment, state)


def expected(before: Tensors, clients: list[int], weights: list[float]) -> Tensors:
    updates = {client.id: update for client, update in Witness.seen}
    return {
        name: value
        + sum(w * updates[c][name].double() for c, w in zip(clients, weights, strict=True))
        / sum(weights)
        for name, value in before.items()
    }


def assert_model(state: RunState, wanted: Tensors) -> None:
    for name, value in state.server.params.items():
        torch.testing.assert_close(value.double(), wanted[name].double(), atol=1e-6, rtol=1e-5)


UNEVEN = {"count": 5, "partition": {"kind": "dirichlet", "alpha": 0.3}}


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_a_round_adds_the_weighted_mean_of_the_updates(weighting: str) -> None:
    train = {**VALUES["train"], "weighting": weighting}
    experiment = witnessed(clients=UNEVEN, train=train)
    state, before, _ = one_round(experiment)
    sizes = [float(n) for n in experiment.task(0).partition.sizes]
    assert len(set(sizes)) > 1
    assert_model(
        state, expected(before, list(range(5)), sizes if weighting == "samples" else [1.0] * 5)
    )


def test_updates_that_are_not_finite_are_left_out_named_and_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    experiment = witnessed((1, 4), clients=UNEVEN)
    with caplog.at_level(logging.WARNING):
        state, before, event = one_round(experiment)
    sizes = [float(experiment.task(0).partition.sizes[c]) for c in (0, 2, 3)]
    assert_model(state, expected(before, [0, 2, 3], sizes))
    *left_out, cause = [r.getMessage() for r in caplog.records]
    assert left_out == [
        f"task 1 round 1: the update of client {c} is not finite and is left out" for c in (1, 4)
    ]
    assert cause.startswith("task 1 round 1: updates of some clients are not finite; likely cause")
    assert event["warnings"] == [cause.removeprefix("task 1 round 1: ")]
    (uploads,) = Witness.counted
    assert uploads.client_weights == dict(zip((0, 2, 3), sizes, strict=True))
    assert uploads.weights == {"update": sum(sizes)}
    assert uploads.upload_fraction == 3 / 5
    assert event["rejected"] == [1, 4]
    assert event["clients"] == state.counters.client_updates == 3
    assert state.counters.rejected == [{"task": 0, "round": 0, "client": c} for c in (1, 4)]


def test_a_round_without_finite_updates_stops_the_run() -> None:
    experiment = witnessed(tuple(range(5)))
    with pytest.raises(RunError, match="no client's update is finite"):
        one_round(experiment)


def test_a_diverging_learning_rate_stops_the_run() -> None:
    train = {"rounds": 9, "batch_size": 4, "lr": 1e30, "local_epochs": 5}
    experiment = build_experiment(parse({**VALUES, "train": train}))
    with pytest.raises(RunError, match=r"train\.lr"):
        run_stream(experiment, experiment.initial_state(), lambda *_: None)


def test_only_sampled_clients_train() -> None:
    experiment = witnessed(clients={"count": 5, "per_round": 2})
    events: list[Any] = []
    state = run_stream(
        experiment, experiment.initial_state(), lambda _, event: events.append(event)
    )
    rounds = [event for event in events if event["event"] == "round"]
    assert [(e["task"], e["round"], e["sampled"], e["clients"]) for e in rounds] == [
        (task, round_, 2, 2) for task in range(2) for round_ in range(2)
    ]
    assert (state.counters.rounds, state.counters.client_updates, state.counters.missing) == (
        4,
        8,
        0,
    )
    assert len(Witness.seen) == 8


def test_dropouts_are_counted_as_missing_and_receive_the_broadcast() -> None:
    experiment = witnessed(clients={"count": 5, "dropout": 0.4})
    state, before, event = one_round(experiment)
    reported = [client.id for client, _ in Witness.seen]
    assert len(reported) == 3
    assert (event["sampled"], event["clients"], state.counters.missing) == (5, 3, 2)
    assert Witness.counted[0].upload_fraction == 3 / 5
    sizes = [float(experiment.task(0).partition.sizes[c]) for c in reported]
    assert_model(state, expected(before, reported, sizes))
    size = len(encode(before))
    assert state.ledger.by_field == {"down/params": 5 * size, "up/update": 3 * size}


def test_a_round_without_uploads_does_not_change_the_model(
    caplog: pytest.LogCaptureFixture,
) -> None:
    experiment = witnessed(clients={"count": 3, "per_round": 3, "dropout": 1 - 1e-12})
    with caplog.at_level(logging.WARNING):
        state, before, event = one_round(experiment)
    assert "task 1 round 1: no client uploaded anything" in caplog.text
    assert (event["clients"], state.counters.missing, state.round) == (0, 3, 1)
    assert all(torch.equal(value, before[name]) for name, value in state.server.params.items())


def test_absent_clients_are_not_sampled() -> None:
    stream = {"kind": "permuted", "tasks": 3, "presence": 0.4}
    experiment = witnessed(stream=stream)
    run_stream(experiment, experiment.initial_state(), lambda *_: None)
    for task in range(3):
        seen = {client.id for client, _ in Witness.seen if client.context.task == task}
        assert seen == set(clients_with_data(experiment.task(task)))
        assert all(len(c.data) for c, _ in Witness.seen)


def test_frozen_blocks_of_a_growing_head_are_sent_once() -> None:
    """Rounds of task 1 train the body and slice 1; slice 0 is sent once to each client."""
    model = {"hidden": [6], "head": "growing"}
    clients = {"count": 4, "per_round": 2}
    experiment = build_experiment(parse({**VALUES, "model": model, "clients": clients}))
    state = experiment.initial_state()
    after_first: Tensors = {}

    def after(state: RunState, event: Any) -> None:
        if event["event"] == "task" and event["task"] == 0:
            after_first.update(state.server.params)

    run_stream(experiment, state, after)
    params = state.server.params
    fresh = {n: p for n, p in params.items() if not n.startswith("head.0.")}
    still = {n: p for n, p in params.items() if n.startswith("head.0.")}
    assert all(torch.equal(value, after_first[name]) for name, value in still.items())
    first = {n: p for n, p in params.items() if not n.startswith("head.1.")}
    # two rounds of two clients each
    assert state.ledger.by_task[0] == {"up": 4 * len(encode(first)), "down": 4 * len(encode(first))}
    assert state.ledger.by_task[1]["up"] == 4 * len(encode(fresh))
    met = len(state.ledger.delivered["frozen"])
    assert met in (2, 3, 4)
    assert state.ledger.by_field["down/frozen"] == met * len(encode(still))
    down = 4 * len(encode(fresh)) + met * len(encode(still))
    assert state.ledger.by_task[1]["down"] == down


@dataclass(frozen=True)
class Found:
    """What the server was sent at the ends of tasks: examples and rounds, by task."""

    examples: dict[int, float] = field(default_factory=dict)
    rounds: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Taken:
    """The rounds in which a client took part."""

    rounds: int = 0


@dataclass(frozen=True)
class Extras(Method):
    """Sends more each round and once per task, keeps a count, and sums both at a task's end."""

    ServerState: ClassVar[type] = Found
    ClientState: ClassVar[type] = Taken

    def exchanges(self, context: Context) -> list[Exchange | Train]:
        return [
            Train(broadcast=self.send, make_upload=self.count),
            Exchange("stats", broadcast=self.send, client_work=self.tell, aggregate=self.note),
        ]

    def send(self, server: Server, context: Context) -> dict[str, Any]:
        basis = OncePerTask({"fc1": torch.zeros(6, 2)})
        return {"anchor": torch.zeros(10), "basis": basis}

    def count(self, client: Client, local: LocalUpdate) -> ClientResult:
        assert set(client.broadcast) == {"params", "anchor", "basis"}
        return ClientResult(state=Taken(client.state.rounds + 1))

    def tell(self, client: Client) -> ClientResult:
        count, rounds = float(len(client.data)), float(client.state.rounds)
        stats = {"count": torch.tensor(count), "rounds": torch.tensor(rounds)}
        return ClientResult({"stats": Sum(stats, weight=1.0)})

    def note(self, server: Server, uploads: CollectedUploads, context: Context) -> Server:
        found, state = uploads.total("stats"), server.state
        examples = state.examples | {context.task: float(found["count"])}
        rounds = state.rounds | {context.task: float(found["rounds"])}
        return replace(server, state=Found(examples, rounds))


def test_a_task_end_exchange_reaches_all_clients_with_data_and_their_states() -> None:
    clients = {"count": 5, "per_round": 3}
    experiment = build_experiment(
        parse({**VALUES, "clients": clients, "method": {"kind": f"{__name__}.Extras"}})
    )
    state = run_stream(experiment, experiment.initial_state(), lambda *_: None)
    for task in range(2):
        sizes = experiment.task(task).partition.sizes
        assert state.server.state.examples[task] == float(sizes.sum())
        assert state.server.state.rounds[task] == 6.0 * (task + 1)
    assert sum(experiment.client_state(c)[0].rounds for c in range(5)) == 12


def test_bytes_of_a_broadcast_are_counted_by_field() -> None:
    experiment = build_experiment(parse({**VALUES, "method": {"kind": f"{__name__}.Extras"}}))
    state = run_stream(experiment, experiment.initial_state(), lambda *_: None)
    anchor = len(encode({"anchor": torch.zeros(10)}))
    basis = len(encode({"basis/fc1": torch.zeros(6, 2)}))
    stats = len(encode({"count": torch.tensor(0.0), "rounds": torch.tensor(0.0)}))
    model = len(encode(state.server.params))
    tasks, clients, broadcasts = 2, 5, 3  # two rounds and the extra one
    assert state.ledger.by_field == {
        "down/params": tasks * clients * broadcasts * model,
        "down/anchor": tasks * clients * broadcasts * anchor,
        "down/basis": tasks * clients * basis,
        "up/update": tasks * clients * 2 * model,
        "up/stats": tasks * clients * stats,
    }


def test_every_round_and_task_has_an_event() -> None:
    train = {**VALUES["train"], "rounds": [3, 2], "schedule": {"kind": "step", "every": 1}}
    values = {**VALUES, "train": train, "runs": {"evaluate_every": 2}}
    experiment, events = build_experiment(parse(values)), []
    state = run_stream(
        experiment, experiment.initial_state(), lambda _, event: events.append(event)
    )
    kinds = [(event["event"], event["task"]) for event in events]
    assert kinds == [("round", 0)] * 3 + [("task", 0)] + [("round", 1)] * 2 + [("task", 1)]
    looks = [event.get("accuracy") is not None for event in events if event["event"] == "round"]
    assert looks == [False, True, False, False, True]
    rates = [event["lr"] for event in events if event["event"] == "round"]
    assert rates == pytest.approx([0.1, 0.099, 0.09801, 0.1, 0.099])
    assert events[-1]["accuracy"] == {mode: rows[-1] for mode, rows in state.matrix.items()}
    # an evaluation in the last round is of the model that the task's row evaluates
    assert events[5]["accuracy"]["task_aware"] == state.matrix["task_aware"][1][1]
    assert events[-1]["bytes"] == state.ledger.by_task[-1]


def test_matrices_are_lower_triangles() -> None:
    experiment = build_experiment(parse({**VALUES, "stream": {**VALUES["stream"], "tasks": 3}}))
    state = run_stream(experiment, experiment.initial_state(), lambda *_: None)
    for mode in ("task_agnostic", "task_aware"):
        rows = state.matrix[mode]
        assert [[value is None for value in row] for row in rows] == (
            ~np.tri(3, dtype=bool)
        ).tolist()
        assert all(0 <= value <= 1 for row in rows for value in row if value is not None)
    assert state.matrix["routed"] == [[None] * 3] * 3


def test_the_seconds_of_all_parts_add_up_to_the_total() -> None:
    experiment = build_experiment(parse(VALUES))
    seconds = run_stream(experiment, experiment.initial_state(), lambda *_: None).seconds
    assert seconds["total"] == pytest.approx(sum(seconds.values()) - seconds["total"])
    assert seconds["train"] > 0


def test_training_learns() -> None:
    """Against chance and against the untrained model, on unpermuted digits."""
    values = {**VALUES, "data": {}, "stream": {"kind": "permuted", "tasks": 1}}
    values["model"], values["train"] = {"hidden": [32]}, {"rounds": 8, "batch_size": 16}
    experiment = build_experiment(parse(values))
    state = run_stream(experiment, experiment.initial_state(), lambda *_: None)
    found = state.matrix["task_agnostic"][0][0]
    assert found is not None
    assert found > 0.85
