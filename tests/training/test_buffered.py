"""Buffered aggregation: a round closes after so many uploads, and late ones count later."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import perdure
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
    Server,
    Train,
)
from perdure.core.trees import Tensors
from perdure.runs import checkpoint
from perdure.training import round as buffered
from perdure.training.experiment import build_experiment
from perdure.training.loop import run_stream
from perdure.training.state import PendingUpload, RunState

VALUES: dict[str, Any] = {
    "data": {"limit": 120, "test_limit": 60},
    "stream": {"kind": "split", "tasks": 2, "classes_per_task": 3},
    "clients": {"count": 5, "partition": {"kind": "dirichlet", "alpha": 0.5}},
    "model": {"hidden": [6], "head": "growing"},
    "train": {"rounds": 4, "batch_size": 16},
    "engine": {"kind": "serial"},
}


@dataclass(frozen=True)
class Turns:
    """A client's state: how often it has trained."""

    count: int = 0


@dataclass(frozen=True)
class Closed:
    """What the server saw when a round closed."""

    task: int
    round: int
    staleness: dict[int, int]
    weight: float
    change: Tensors


@dataclass(frozen=True)
class Buffered(Method):
    """Closes a round after k uploads; an upload that is s rounds late counts decay^s."""

    k: int = 2
    decay: float = 1.0
    closed: ClassVar[list[Closed]] = []
    sent: ClassVar[list[tuple[int, int, int, Tensors]]] = []

    ClientState: ClassVar[type] = Turns

    def exchanges(self, context: Context) -> list[Exchange | Train]:
        return [
            Train(
                buffer_size=self.k,
                staleness_weight=self.discount,
                make_upload=self.count,
                adjust=self.note,
            )
        ]

    def discount(self, staleness: int) -> float:
        return self.decay**staleness

    def count(self, client: Client, local: LocalUpdate) -> ClientResult:
        self.sent.append((client.context.task, client.context.round, client.id, local.update))
        return ClientResult(state=Turns(client.state.count + 1))

    def note(
        self, server: Server, change: Change, uploads: CollectedUploads, context: Context
    ) -> Change:
        weight, late = uploads.weights["update"], dict(uploads.staleness)
        self.closed.append(Closed(context.task, context.round, late, weight, change.params))
        return change


@pytest.fixture(autouse=True)
def _nothing_closed_yet() -> None:
    Buffered.closed.clear()
    Buffered.sent.clear()


def values(k: int = 2, decay: float = 1.0, **changes: Any) -> dict[str, Any]:
    method = {"kind": f"{__name__}.Buffered", "k": k, "decay": decay}
    return {**VALUES, "method": method, **changes}


def delays(monkeypatch: pytest.MonkeyPatch, table: dict[int, float]) -> None:
    """Give each client a time that it always takes."""
    monkeypatch.setattr(buffered, "training_time", lambda context, client: table.get(client, 0.0))


def final(config: dict[str, Any]) -> RunState:
    experiment = build_experiment(parse(config))
    return run_stream(experiment, experiment.initial_state(), lambda *_: None)


@pytest.mark.parametrize("per_round", [5, 3])
def test_without_delays_and_with_all_uploads_buffered_aggregation_is_fedavg(
    per_round: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    delays(monkeypatch, {})
    clients = {**VALUES["clients"], "per_round": per_round}
    mine, plain = final(values(per_round, clients=clients)), final({**VALUES, "clients": clients})
    assert mine.server.params.keys() == plain.server.params.keys()
    for name, value in plain.server.params.items():
        assert torch.equal(mine.server.params[name], value), name
    assert mine.matrix == plain.matrix
    sent, expected = ({**state.ledger.summary(), "kept": None} for state in (mine, plain))
    assert sent == expected
    assert mine.counters == plain.counters
    assert all(late == 0 for each in Buffered.closed for late in each.staleness.values())


def test_a_slow_client_is_late_by_the_rounds_that_closed_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Client 4 takes as long as three rounds of the others; it begins with all of them."""
    delays(monkeypatch, dict.fromkeys(range(4), 1.0) | {4: 2.5})
    state = final(values(4, train={"rounds": 5, "batch_size": 16}))
    quick = dict.fromkeys(range(4), 0)
    for task in range(2):
        assert [each.staleness for each in Buffered.closed if each.task == task] == [
            quick,
            quick,
            {0: 0, 1: 0, 2: 0, 4: 2},  # at 2.5 it is the first to arrive, and client 3 has to wait
            {0: 0, 1: 0, 2: 0, 3: 1},
            quick | {4: 1},  # the last round waits for all
        ]
    assert not state.pending_uploads
    assert state.simulated_time == pytest.approx(2 * 5.5)


def test_the_last_round_of_a_task_waits_for_all() -> None:
    """So that nothing of a task's own head arrives when the next one does not train it."""
    final(values(2))
    by_task = {task: [c for c in Buffered.closed if c.task == task] for task in range(2)}
    for task, rounds in by_task.items():
        assert [len(each.staleness) for each in rounds[:3]] == [2, 2, 2]
        started = [(task, n) for at, n, _, _ in Buffered.sent if at == task]
        assert sum(len(each.staleness) for each in rounds) == len(started)
        own, other = f"head.{task}.weight", f"head.{1 - task}.weight"
        assert all(own in each.change and other not in each.change for each in rounds)
    assert max(late for c in Buffered.closed for late in c.staleness.values()) > 0


def test_a_late_upload_counts_with_its_weight_times_the_discount() -> None:
    experiment = build_experiment(parse(values(2, decay=0.5)))
    run_stream(experiment, experiment.initial_state(), lambda *_: None)
    sent = {(task, n, client): update for task, n, client, update in Buffered.sent}
    assert any(late for each in Buffered.closed for late in each.staleness.values())
    for each in Buffered.closed:
        sizes = experiment.task(each.task).partition.sizes
        weights = {c: float(sizes[c]) * 0.5**late for c, late in each.staleness.items()}
        assert each.weight == pytest.approx(sum(weights.values()))
        for name, change in each.change.items():
            parts = [
                weight * sent[each.task, each.round - each.staleness[client], client][name].double()
                for client, weight in weights.items()
            ]
            expected = torch.stack(parts).sum(0) / sum(weights.values())
            torch.testing.assert_close(change.double(), expected, rtol=1e-4, atol=1e-6)


def test_a_busy_client_is_not_started_again() -> None:
    experiment = build_experiment(parse(values(2)))
    began: list[tuple[int, int]] = []

    def after(state: RunState, event: Any) -> None:
        if event["event"] == "round":
            waiting = {upload.client for upload in state.pending_uploads}
            now = {c for task, n, c, _ in Buffered.sent if (task, n) == _at(event)}
            counted = set(Buffered.closed[-1].staleness)
            assert now <= waiting | counted
            began.append((len(now), len(waiting)))
            for upload in state.pending_uploads:
                kept = experiment.client_state(upload.client)[0].count
                assert upload.state.count == kept + 1  # not before its upload counts

    run_stream(experiment, experiment.initial_state(), after)
    assert began[1][0] == 2  # three of the five were still under way


def _at(event: Any) -> tuple[int, int]:
    return event["task"], event["round"]


# ---- stopped in between


class Stopped(BaseException):
    """Stands for Ctrl-C."""


def stopping(steps: int) -> Any:
    left = [steps]

    def watch(state: RunState, event: Any) -> None:
        left[0] -= 1
        if not left[0]:
            raise Stopped

    return watch


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 6, 9])
def test_a_resumed_buffered_run_ends_alike(steps: int, tmp_path: Path) -> None:
    config = values(2, decay=0.5)
    whole = perdure.run(config).values
    with pytest.raises(Stopped):
        perdure.run(config, out=tmp_path / "run", watch=stopping(steps))
    saved = checkpoint.read(checkpoint.paths(tmp_path / "run" / "checkpoints")[-1])["state"]
    within = saved["round"] not in (0, 4)
    assert bool(saved["pending_uploads"]) == within
    assert (saved["simulated_time"] > 0) == (steps > 0)
    again = perdure.resume(tmp_path / "run").values
    for key in ("model_sha256", "matrix", "bytes", "client_updates"):
        assert again[key] == whole[key], key


def test_a_pending_upload_is_restored_from_its_tree() -> None:
    experiment = build_experiment(parse(values(2)))
    state, pending = experiment.initial_state(), []

    def after(state: RunState, event: Any) -> None:
        pending.extend(state.pending_uploads if len(pending) == 0 else ())

    run_stream(experiment, state, after)
    for upload in pending:
        upload = replace(upload, private={"own": torch.ones(2)})
        again = PendingUpload.from_tree(upload.to_tree(), experiment.method)
        assert (again.arrival_time, again.start_round) == (upload.arrival_time, upload.start_round)
        assert (again.client, again.uploads.weights) == (upload.client, upload.uploads.weights)
        assert again.state == upload.state
        assert torch.equal(again.private["own"], torch.ones(2))
        for name, part in upload.uploads.fields.items():
            found = again.uploads.fields[name]
            assert type(found) is type(part)
            assert all(torch.equal(found.value[key], v) for key, v in part.value.items())
    assert len(pending) == 3
