"""Opening and task-end exchanges: participants, order, and stored states."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import perdure
from perdure.config import parse
from perdure.contract import (
    Change,
    Client,
    ClientResult,
    CollectedUploads,
    Context,
    ContractError,
    Exchange,
    Method,
    OncePerTask,
    Server,
    Sum,
    Train,
)
from perdure.core.trees import decode
from perdure.core.trees import encode as encode_tree
from perdure.training.experiment import Experiment, build_experiment
from perdure.training.ledger import encode
from perdure.training.loop import begin_task, run_stream
from perdure.training.sampling import clients_with_data
from perdure.training.state import RunState, check_server

VALUES: dict[str, Any] = {
    "data": {"limit": 90, "test_limit": 50},
    "stream": {"kind": "permuted", "tasks": 3, "presence": 0.5},
    "clients": {"count": 6, "per_round": 2},
    "model": {"hidden": [6]},
    "train": {"rounds": 2, "batch_size": 16},
    "engine": {"kind": "serial"},
}
Where = tuple[int, int, int]


@dataclass(frozen=True)
class Seen:
    """The server's state: the positions (task, round, exchange) of its aggregations."""

    at: tuple[int, ...] = ()
    total: float = 0.0


@dataclass(frozen=True)
class Turns:
    """A client's state: the exchanges in which it took part."""

    count: int = 0


@dataclass(frozen=True)
class Noted(Method):
    """Records which client worked in which exchange. The test gives the exchanges."""

    before: tuple[Exchange, ...] = ()
    after: tuple[Exchange, ...] = ()
    train: Train = field(default_factory=Train)
    worked: list[tuple[Where, int, int]] = field(default_factory=list, compare=False)
    taken: list[tuple[Where, list[int]]] = field(default_factory=list, compare=False)

    ServerState: ClassVar[type] = Seen
    ClientState: ClassVar[type] = Turns

    def exchanges(self, context: Context) -> list[Exchange | Train]:
        return [*self.before, self.train, *self.after]

    def work(self, client: Client) -> ClientResult:
        self.worked.append((where(client.context), client.id, len(client.data)))
        return ClientResult({"n": Sum({"n": torch.ones(())}, 1.0)}, Turns(client.state.count + 1))

    def take(self, server: Server, uploads: CollectedUploads, context: Context) -> Server:
        self.taken.append((where(context), uploads.clients))
        state = server.state
        return replace(server, state=Seen((*state.at, context.exchange), state.total + 1))


def where(context: Context) -> Where:
    return context.task, context.round, context.exchange


def noted(**parts: Any) -> Noted:
    """A method whose exchanges do its own work and take it in, unless they say otherwise."""
    lists: tuple[Any, Any] = ([], [])
    bare = Noted(worked=lists[0], taken=lists[1])
    done = {
        key: tuple(replace(e, client_work=bare.work, aggregate=bare.take) for e in value)
        if key != "train" else value
        for key, value in parts.items()
    }  # fmt: skip
    return replace(bare, **done)


def run(method: Method, **changes: Any) -> tuple[Experiment, RunState]:
    experiment = replace(build_experiment(parse({**VALUES, **changes})), method=method)
    return experiment, run_stream(experiment, experiment.initial_state(), lambda *_: None)


def test_an_opening_exchange_reaches_all_clients_with_data_before_the_first_round() -> None:
    method = noted(before=(Exchange("hello"),))
    experiment, state = run(method)
    for task in range(3):
        there = clients_with_data(experiment.task(task))
        seen = [(client, rows) for at, client, rows in method.worked if at[0] == task]
        assert [client for client, _ in seen] == there  # not the two that a round samples
        assert all(rows == experiment.task(task).partition.sizes[client] for client, rows in seen)
        assert {at for at, *_ in method.worked if at[0] == task} == {(task, 0, -1)}
    assert [clients for _, clients in method.taken] == [
        clients_with_data(experiment.task(task)) for task in range(3)
    ]
    joined = sum(len(clients_with_data(experiment.task(task))) for task in range(3))
    assert state.ledger.by_field["up/n"] == joined * len(encode({"n": torch.ones(())}))
    model = len(encode(state.server.params))
    assert state.ledger.by_field["down/params"] == (joined + 3 * 2 * 2) * model


def test_an_opening_exchange_without_participants_runs_on_the_server_alone() -> None:
    method = noted(before=(Exchange("start", "none"),))
    _, state = run(method)
    plain = run(Method())[1]
    assert method.worked == []
    assert method.taken == [((task, 0, -1), []) for task in range(3)]
    assert state.ledger.summary() == plain.ledger.summary()
    assert all(torch.equal(v, plain.server.params[n]) for n, v in state.server.params.items())


def test_participants_ever_are_the_clients_of_all_tasks_so_far() -> None:
    method = noted(after=(Exchange("all", "ever"),))
    experiment, _ = run(method)
    met: set[int] = set()
    for task in range(3):
        there = set(clients_with_data(experiment.task(task)))
        met |= there
        seen = {client: rows for at, client, rows in method.worked if at[0] == task}
        assert list(seen) == sorted(met)
        assert {client for client, rows in seen.items() if rows} == there
    assert len(met) > len(clients_with_data(experiment.task(2)))  # some of them hold nothing of it


def test_task_end_exchanges_run_in_order_after_the_last_round() -> None:
    ends = (Exchange("one"), Exchange("two", "none"), Exchange("three"))
    method = noted(before=(Exchange("open", "none"),), after=ends)
    experiment, state = run(method)
    assert [at for at, _ in method.taken] == [
        (task, *position) for task in range(3) for position in ((0, -1), (2, 1), (2, 2), (2, 3))
    ]
    assert state.server.state.at == (-1, 1, 2, 3) * 3  # each sees the server of the one before
    there = sum(len(clients_with_data(experiment.task(task))) for task in range(3))
    kept = [experiment.client_state(client)[0].count for client in range(6)]
    assert sum(kept) == 2 * there  # and each client the state of its exchange before


def test_an_exchange_without_participants_collects_no_fields() -> None:
    found: list[CollectedUploads] = []

    @dataclass(frozen=True)
    class Alone(Noted):
        def take(self, server: Server, uploads: CollectedUploads, context: Context) -> Server:
            found.append(uploads)
            return server

    method = Alone()
    quiet = Exchange("quiet", aggregate=method.take)  # clients that have nothing to say
    nobody = Exchange("nobody", "none", aggregate=method.take)
    run(replace(method, after=(quiet, nobody)))
    assert len(found) == 6
    for uploads in found:
        assert uploads.clients == []
        assert not uploads.has("update")
        with pytest.raises(ContractError, match=r"uploads\.mean: must be left out .*, got 'n'"):
            uploads.mean("n")


def test_without_broadcast_and_aggregate_nothing_travels() -> None:
    method = noted(after=(Exchange("alone"),))
    method = replace(method, after=(replace(method.after[0], aggregate=None),))
    with pytest.raises(ContractError, match=r"^exchange 'alone': .*, got the fields \['n'\]$"):
        run(method)

    @dataclass(frozen=True)
    class Quiet(Noted):
        def work(self, client: Client) -> ClientResult:
            return ClientResult(state=Turns(client.state.count + 1))

    silent = Quiet()
    experiment, state = run(replace(silent, after=(Exchange("alone", client_work=silent.work),)))
    sent, plain = ({**s.ledger.summary(), "kept": None} for s in (state, run(Method())[1]))
    assert sent == plain  # clients store something, but send nothing
    tasks = range(3)
    expected = [sum(c in clients_with_data(experiment.task(t)) for t in tasks) for c in range(6)]
    assert [experiment.client_state(client)[0].count for client in range(6)] == expected


# ---- what is broadcast once per task


def sending(value: Callable[[Context], Tensor]) -> Noted:
    def send(server: Server, context: Context) -> dict[str, Any]:
        return {"basis": OncePerTask({"fc1": value(context)})}

    method = noted(before=(Exchange("open"),), after=(Exchange("end"),))
    return replace(
        method,
        before=(replace(method.before[0], broadcast=send),),
        after=(replace(method.after[0], broadcast=send),),
        train=Train(broadcast=send),
    )


def test_a_once_per_task_value_is_sent_once_over_all_exchanges_of_a_task() -> None:
    experiment, state = run(sending(lambda context: torch.full((5, 5), float(context.task))))
    one = len(encode({"basis/fc1": torch.zeros(5, 5)}))
    sent = sum(len(clients_with_data(experiment.task(task))) for task in range(3))
    assert state.ledger.by_field["down/basis"] == sent * one


@pytest.mark.parametrize("moment", [(0, 1, 0), (1, 2, 1)], ids=["in a round", "at the end"])
def test_a_once_per_task_value_must_not_change_within_the_task(moment: Where) -> None:
    changed = sending(lambda context: torch.full((2,), float(where(context) == moment)))
    with pytest.raises(ContractError, match="broadcast: 'basis': must be the same value"):
        run(changed)


# ---- rounds


def test_a_method_may_choose_its_number_of_rounds() -> None:
    contexts: list[Context] = []

    @dataclass(frozen=True)
    class Counted(Noted):
        def exchanges(self, context: Context) -> list[Exchange | Train]:
            train = Train(rounds=context.task, adjust=self.adjust)
            return [train, Exchange("end", "none", aggregate=self.take)]

        def adjust(
            self, server: Server, change: Change, uploads: CollectedUploads, context: Context
        ) -> Change:
            contexts.append(context)
            return change

    method, events = Counted(), []
    experiment = replace(build_experiment(parse(VALUES)), method=method)
    start = experiment.initial_state()
    state = run_stream(experiment, start, lambda _, event: events.append(event))
    assert [(e["event"], e["task"]) for e in events] == [
        ("task", 0), ("round", 1), ("task", 1), ("round", 2), ("round", 2), ("task", 2),
    ]  # fmt: skip
    assert [(c.task, c.round, c.rounds) for c in contexts] == [(1, 0, 1), (2, 0, 2), (2, 1, 2)]
    assert [at for at, _ in method.taken] == [(0, 0, 1), (1, 1, 1), (2, 2, 1)]
    assert state.counters.rounds == 3
    assert [len(row) for row in state.matrix["task_agnostic"]] == [3, 3, 3]


def test_a_task_without_rounds_does_not_change_the_model() -> None:
    experiment, state = run(noted(train=Train(rounds=0)))
    before = experiment.initial_state().server.params
    assert all(torch.equal(v, before[name]) for name, v in state.server.params.items())
    assert (state.ledger.up, state.ledger.down) == (0, 0)


def test_the_time_of_opening_exchanges_is_counted() -> None:
    @dataclass(frozen=True)
    class Slow(Noted):
        def take(self, server: Server, uploads: CollectedUploads, context: Context) -> Server:
            time.sleep(0.05)
            return server

    method = Slow()
    _, state = run(replace(method, before=(Exchange("slow", "none", aggregate=method.take),)))
    assert state.seconds["consolidate"] >= 3 * 0.05
    assert state.seconds["total"] >= state.seconds["consolidate"]


# ---- the server as a checkpoint brings it back


@dataclass(frozen=True)
class Mixed:
    """Keys that are numbers, tuples, and tensors that do not lie in one piece."""

    by_task: dict[int, list[float]] = field(default_factory=dict)
    pairs: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class Keeps(Method):
    ServerState: ClassVar[type] = Mixed


def test_a_server_equals_its_restored_checkpoint() -> None:
    experiment: Any = replace(build_experiment(parse(VALUES)), method=Keeps())
    turned = torch.arange(6.0).view(3, 2).T
    given = Mixed({3: [1.0, 2.0]}, (turned.clone().requires_grad_(), turned))
    params = {"w": torch.arange(6.0).view(2, 3).T.requires_grad_()}
    found = check_server(experiment.method, Server({}), Server(params, {}, given), "test")
    assert found.state.by_task == given.by_task
    for value in found.state.pairs:
        assert value.is_contiguous()
        assert not value.requires_grad
        assert torch.equal(value, turned)
    assert found.params["w"].is_contiguous()
    assert not found.params["w"].requires_grad
    assert torch.equal(found.params["w"], params["w"])
    tree = decode(encode_tree(RunState(found).to_tree()))
    again = RunState.from_tree(tree, experiment.method).server
    assert again.state.by_task == {3: [1.0, 2.0]}
    assert isinstance(again.state.pairs, tuple)
    assert torch.equal(again.state.pairs[1], turned)
    assert torch.equal(again.params["w"], params["w"])


@pytest.mark.parametrize(
    ("state", "sentence"),
    [
        (Mixed({3: (1.0, 2.0)}), "server state.by_task[3]: must be a list, as it is read from a "),  # type: ignore[dict-item]
        (Mixed({3: [1]}), "server state.by_task[3][0]: must be a float, as it is read from a "),
        (Mixed({"3": [1.0]}), "server state.by_task: must be keys [3], as they are read again, "),  # type: ignore[dict-item]
        (Mixed({}, [torch.ones(2)]), "server state.pairs: must be a tuple, as it is read from a "),  # type: ignore[arg-type]
    ],
    ids=["a tuple", "an integer", "another key", "a list"],
)
def test_a_state_that_a_checkpoint_would_change_is_refused(state: Mixed, sentence: str) -> None:
    with pytest.raises(ContractError, match=re.escape(sentence)):
        check_server(Keeps(), Server({}), Server({}, {}, state), "test")


@pytest.mark.parametrize(
    ("server", "sentence"),
    [
        (None, "here: must be a Server, got a NoneType"),
        (Server({}), "here: state: must be a Seen, got a Nothing"),
        (Server({}, {}, Seen(at=("one",))), r"server state\.at\[0\]: must be an int, got a str"),  # type: ignore[arg-type]
        (
            Server({}, {}, Seen(total=object())),
            r"total: must be made of tensors, .*, got an object$",
        ),  # type: ignore[arg-type]
    ],
    ids=["no server", "another class", "another type", "what no file can hold"],
)
def test_a_server_that_cannot_be_saved_is_refused(server: Any, sentence: str) -> None:
    experiment: Any = replace(build_experiment(parse(VALUES)), method=Noted())
    with pytest.raises(ContractError, match=sentence):
        check_server(experiment.method, Server({}, {}, Seen()), server, "here")


# ---- stopped within a task


@dataclass(frozen=True)
class Walk:
    """The server's state: a random walk that each opening moves on."""

    place: Tensor | None = None
    opened: int = 0


@dataclass(frozen=True)
class Opens(Method):
    """Opening exchanges that change the model; they must not run twice."""

    ServerState: ClassVar[type] = Walk
    ClientState: ClassVar[type] = Turns

    def exchanges(self, context: Context) -> list[Exchange | Train]:
        return [
            Exchange("walk", "none", aggregate=self.walk),
            Exchange("ask", broadcast=self.send, client_work=self.say, aggregate=self.move),
            Train(broadcast=self.send, adjust=self.adjust),
            Exchange("tell", broadcast=self.send, client_work=self.say, aggregate=self.move),
        ]

    def walk(self, server: Server, uploads: CollectedUploads, context: Context) -> Server:
        step = torch.randn(6, generator=context.draw("walk"))
        place = step if server.state.place is None else server.state.place + step
        return replace(server, state=Walk(place, server.state.opened + 1))

    def send(self, server: Server, context: Context) -> dict[str, Any]:
        return {"opened": OncePerTask(torch.tensor(server.state.opened))}

    def say(self, client: Client) -> ClientResult:
        noise = torch.rand(6, generator=client.draw("say")) * (1 + client.state.count)
        return ClientResult({"noise": Sum({"noise": noise})}, Turns(client.state.count + 1))

    def move(self, server: Server, uploads: CollectedUploads, context: Context) -> Server:
        bias = server.params["fc1.bias"] + 0.01 * uploads.mean("noise")["noise"]
        return replace(server, params=server.params | {"fc1.bias": bias})

    def adjust(
        self, server: Server, change: Change, uploads: CollectedUploads, context: Context
    ) -> Change:
        bias = change.params["fc1.bias"] + 0.01 * server.state.place
        return replace(change, params=change.params | {"fc1.bias": bias})


class Stopped(BaseException):
    """Stands for Ctrl-C."""


def stopping(steps: int) -> Any:
    left = [steps]

    def watch(state: RunState, event: Any) -> None:
        left[0] -= 1
        if not left[0]:
            raise Stopped

    return watch


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 8])
def test_a_run_that_is_stopped_within_a_task_ends_alike(steps: int, tmp_path: Path) -> None:
    values = {**VALUES, "method": {"kind": f"{__name__}.Opens"}}
    whole = perdure.run(values).values
    with pytest.raises(Stopped):
        perdure.run(values, out=tmp_path / "run", watch=stopping(steps))
    again = perdure.resume(tmp_path / "run").values
    for key in ("model_sha256", "matrix", "bytes"):
        assert again[key] == whole[key], key
    assert whole["bytes"]["by_field"]["down/opened"] > 0


def test_begin_task_runs_every_opening_exchange_once() -> None:
    method = noted(before=(Exchange("open", "none"),))
    experiment = replace(build_experiment(parse(VALUES)), method=method)
    state = experiment.initial_state()
    begin_task(experiment, state)
    assert state.server.state.at == (-1,)
    state.round = 1  # as a checkpoint within the task says
    run_stream(experiment, state, lambda *_: None)
    assert [at for at, _ in method.taken] == [(0, 0, -1), (1, 0, -1), (2, 0, -1)]
