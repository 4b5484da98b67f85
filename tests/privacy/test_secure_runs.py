"""Whole runs under secure aggregation: the same models, refused methods, repeated rounds, bytes."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
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
    Each,
    Exchange,
    LocalUpdate,
    Method,
    Server,
    Sum,
    Train,
)
from perdure.contract.uploads import FailedUpload, MaskedUpload, StackedUploads
from perdure.core.errors import RunError, UserError
from perdure.privacy.secagg.client import SimulatedSecAggClients
from perdure.privacy.secagg.messages import MaskedRow, SumRequest, decode
from perdure.training.collector import UploadCollector
from perdure.training.experiment import Experiment, build_experiment
from perdure.training.loop import begin_task, run_stream
from perdure.training.round import TrainingRound, train_round
from perdure.training.state import RunState

VALUES: dict[str, Any] = {
    "data": {"limit": 120},
    "stream": {"kind": "permuted", "tasks": 2},
    "clients": {"count": 6, "per_round": 5, "partition": {"kind": "dirichlet", "alpha": 1.0}},
    "model": {"hidden": [6]},
    "train": {"rounds": 2, "batch_size": 16},
    "engine": {"kind": "serial"},
}
SECURE = {"secagg": True}


def collector_of(experiment: Experiment, state: RunState, clients: list[int]) -> UploadCollector:
    """Return the collector of a round with these clients."""
    round_ = TrainingRound(experiment, state)
    round_.open(clients)
    return round_.collector


def finished(**changes: Any) -> tuple[Experiment, RunState]:
    experiment = build_experiment(parse({**VALUES, **changes}))
    return experiment, run_stream(experiment, experiment.initial_state(), lambda *_: None)


def assert_same_model(one: RunState, other: RunState) -> None:
    for name, value in one.server.params.items():
        torch.testing.assert_close(value, other.server.params[name], atol=2e-6, rtol=1e-5)


METHODS = [
    {"kind": "fedavg"},
    {"kind": "fot"},
    {"kind": "special"},
    {"kind": "fedprotip", "transport": "sketch"},
]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: str(method["kind"]))
def test_the_model_is_that_of_a_plain_run(method: dict[str, Any]) -> None:
    _, plain = finished(method=method)
    _, secure = finished(method=method, privacy=SECURE)
    assert_same_model(plain, secure)


@pytest.mark.parametrize("router", ["references", "gaussian"])
def test_sums_of_clients_that_are_absent_now(router: str) -> None:
    """Clients without data of a task renew their references in the same masked sums."""
    method = {"kind": "fedprotip", "transport": "sketch", "bases": "pooled", "router": router}
    stream = {"kind": "permuted", "tasks": 3, "presence": 0.5}
    _, plain = finished(method=method, stream=stream)
    _, secure = finished(method=method, stream=stream, privacy=SECURE)
    assert_same_model(plain, secure)
    for name, rows in plain.server.state.references.items():
        torch.testing.assert_close(secure.server.state.references[name], rows, atol=1e-3, rtol=1e-3)


def test_a_method_may_weight_clients_itself() -> None:
    """PIP weights clients by a count, which is masked with the rest."""
    prompted = {
        "stream": {"kind": "split", "tasks": 2, "classes_per_task": 3},
        "clients": {"count": 3, "partition": {"kind": "classes"}},
        "model": {"kind": "vit", "init": "random", "width": 8, "heads": 2, "depth": 5, "patch": 4},
        "train": {"rounds": 2, "max_steps": 2},
        "method": {"kind": "pip"},
    }
    _, plain = finished(**prompted)
    _, secure = finished(**prompted, privacy=SECURE)
    assert_same_model(plain, secure)


@pytest.mark.parametrize(("engine", "single_message"), [("serial", False), ("vector", True)])
def test_dropouts_do_not_change_the_model_on_any_engine(engine: str, single_message: bool) -> None:
    clients = {**VALUES["clients"], "dropout": 0.2}
    more = {"clients": clients, "engine": {"kind": engine}}
    _, plain = finished(**more)
    _, secure = finished(**more, privacy={**SECURE, "single_message": single_message})
    assert plain.counters.missing == secure.counters.missing == 4
    assert_same_model(plain, secure)


def test_32_bits_are_enough_with_a_lower_precision() -> None:
    _, plain = finished()
    _, secure = finished(privacy={**SECURE, "bits": 32, "precision": 18})
    for name, value in plain.server.params.items():
        torch.testing.assert_close(value, secure.server.params[name], atol=1e-4, rtol=0)


REFUSED = [
    ({"kind": "stamp"}, "'update'"),
    ({"kind": "fedomg"}, "'update'"),
    ({"kind": "fedprotip", "bases": "union"}, "'bases' and 'references'"),
    ({"kind": "fedprotip", "routing": "off"}, "'bases'"),
    ({"kind": "fedprotip", "with": [{"kind": "special"}]}, "'fedprotip.bases'"),
]


@pytest.mark.parametrize(("method", "field"), REFUSED, ids=lambda x: str(x))
@pytest.mark.parametrize("privacy", [SECURE, {"clip": 1.0}], ids=["secagg", "clip"])
def test_methods_with_per_client_fields_are_refused_before_training(
    method: dict[str, Any], field: str, privacy: dict[str, Any]
) -> None:
    with pytest.raises(UserError, match=field):
        build_experiment(parse({**VALUES, "method": method, "privacy": privacy}))


def test_stamp_sends_only_sums_if_it_only_averages() -> None:
    build_experiment(
        parse({**VALUES, "method": {"kind": "stamp", "spatial": False}, "privacy": SECURE})
    )


@dataclass(frozen=True)
class Undeclared(Method):
    """Sends a per-client field that it does not declare."""

    def exchanges(self, context: Context) -> list[Exchange | Train]:
        return [Train(make_upload=self.show)]

    def show(self, client: Client, local: LocalUpdate) -> ClientResult:
        return ClientResult({"peek": Each({"n": torch.ones(1)})})


@pytest.mark.parametrize("privacy", [SECURE, {"clip": 1.0}], ids=["secagg", "clip"])
def test_an_undeclared_field_never_reaches_the_server(privacy: dict[str, Any]) -> None:
    with pytest.raises(RunError, match="'peek'"):
        finished(method={"kind": f"{__name__}.Undeclared"}, privacy=privacy)


@pytest.mark.parametrize("privacy", [SECURE, {"clip": 1.0}], ids=["secagg", "clip"])
def test_the_collector_refuses_an_undeclared_field_of_any_engine(privacy: dict[str, Any]) -> None:
    experiment = build_experiment(parse({**VALUES, "privacy": privacy}))
    state = experiment.initial_state()
    begin_task(experiment, state)
    collector = collector_of(experiment, state, [0, 1, 2])
    with pytest.raises(RunError, match="'peek'"):
        collector.add(StackedUploads((0,), (1.0,), {"peek": Each({"n": torch.ones(1, 1)})}))


@dataclass(frozen=True)
class Seen:
    """Client state."""

    saw: int = 0


@dataclass(frozen=True)
class Witness(Method):
    """FedAvg that records the uploads that the server gets; some clients send NaN."""

    bad: tuple[int, ...] = ()
    seen: ClassVar[list[CollectedUploads]] = []
    ClientState: ClassVar[type] = Seen

    def exchanges(self, context: Context) -> list[Exchange | Train]:
        return [Train(make_upload=self.spoil, adjust=self.see)]

    def spoil(self, client: Client, local: LocalUpdate) -> ClientResult:
        broken = float("nan") if client.id in self.bad else 1.0
        update = {name: value * broken for name, value in local.update.items()}
        return ClientResult({"update": Sum(update)}, Seen(1))

    def see(
        self, server: Server, change: Change, uploads: CollectedUploads, context: Context
    ) -> Change:
        self.seen.append(uploads)
        return change


@pytest.fixture(autouse=True)
def _clear_witness() -> None:
    Witness.seen.clear()


def witnessed(bad: tuple[int, ...] = (), **changes: Any) -> tuple[Experiment, RunState]:
    method = {"kind": f"{__name__}.Witness", "bad": list(bad)}
    experiment = build_experiment(parse({**VALUES, "method": method, "privacy": SECURE, **changes}))
    state = experiment.initial_state()
    begin_task(experiment, state)
    return experiment, state


def test_the_method_on_the_server_receives_only_sums() -> None:
    experiment, state = witnessed()
    train_round(experiment, state)
    (uploads,) = Witness.seen
    assert uploads.per_client == {}
    assert len(set(uploads.client_weights.values())) == 1  # the mean weight, for all
    sizes = experiment.task(0).partition.sizes
    assert uploads.weights["update"] == pytest.approx(sum(sizes[c] for c in uploads.clients))


@dataclass
class Recorder(SimulatedSecAggClients):
    """Simulated clients that record all messages."""

    sent: list[bytes] = field(default_factory=list)
    calls: list[bytes] = field(default_factory=list)
    requests: list[bytes] = field(default_factory=list)
    answers: list[bytes] = field(default_factory=list)

    def announce(self, call: bytes) -> None:
        self.calls.append(call)
        super().announce(call)

    def upload(self, client: int, fields: Any, weight: float) -> bytes:
        self.sent.append(super().upload(client, fields, weight))
        return self.sent[-1]

    def ask(self, requests: dict[int, bytes]) -> Mapping[int, bytes]:
        found = super().ask(requests)
        self.requests += requests.values()
        self.answers += found.values()
        return found


def reach(experiment: Experiment, transport: Any) -> None:
    """Let secure sums have other clients."""
    assert experiment.privacy.sums is not None
    experiment.privacy.sums.transport = transport


def recorded(**changes: Any) -> tuple[Recorder, RunState]:
    experiment, state = witnessed(**changes)
    transport = Recorder(experiment.rng)
    reach(experiment, transport)
    train_round(experiment, state)
    return transport, state


def test_the_ledger_counts_the_bytes_of_all_messages() -> None:
    transport, state = recorded(clients={"count": 6, "dropout": 0.2})
    keys = 6 * 32
    assert state.ledger.up == keys + sum(map(len, transport.sent + transport.answers))
    down = sum(map(len, transport.requests)) + 6 * len(transport.calls[0])
    assert state.ledger.by_field["down/secagg"] == down
    values = decode(transport.sent[0], MaskedRow).layout.size
    assert state.ledger.by_field["up/update"] == len(transport.sent) * values * 8
    assert state.ledger.types == {"update": "Sum"}


def test_keys_are_new_for_every_task_and_constant_within_it() -> None:
    experiment, state = witnessed()
    transport = Recorder(experiment.rng)
    reach(experiment, transport)
    run_stream(experiment, state, lambda *_: None)
    keys = [decode(call, SumRequest).public_keys for call in transport.calls]
    tasks = [decode(call, SumRequest).session.task for call in transport.calls]
    seen: dict[tuple[int, int], set[bytes]] = {}
    for task, found in zip(tasks, keys, strict=True):
        for client, key in found.items():
            seen.setdefault((task, client), set()).add(key)
    assert all(len(found) == 1 for found in seen.values())
    assert len({key for found in seen.values() for key in found}) == len(seen)
    assert len({decode(call, SumRequest).digest for call in transport.calls}) == len(
        transport.calls
    )


def test_a_client_whose_values_are_not_finite_is_rejected_by_name(
    caplog: pytest.LogCaptureFixture,
) -> None:
    experiment, state = witnessed(bad=(2,), clients={"count": 6})
    event = train_round(experiment, state)
    assert event["rejected"] == [2]
    assert event["clients"] == 5
    assert state.counters.rejected == [{"task": 0, "round": 0, "client": 2}]
    assert "client 2 is not finite" in caplog.text
    assert experiment.store.get(2) == {}
    assert experiment.store.get(3) == {"saw": 1}


def test_an_aborted_round_is_repeated_with_other_clients(caplog: pytest.LogCaptureFixture) -> None:
    """Two of the first four clients cannot upload, but three of four are needed."""
    clients = {"count": 12, "per_round": 4}
    experiment, state = witnessed(clients=clients)
    first = _sampled(experiment, state)
    experiment, state = witnessed(bad=tuple(first[:2]), clients=clients)
    with caplog.at_level(logging.WARNING):
        event = train_round(experiment, state)
    assert state.counters.repeated[0]["attempt"] >= 1
    assert "no secure sum: 2 of 4 clients are left, the threshold is 3" in caplog.text
    assert f"client {first[0]}: not finite" in caplog.text
    (uploads,) = Witness.seen
    assert event["clients"] == len(uploads.clients) >= 3
    assert set(uploads.clients) != set(first)
    alone = set(first[2:])
    assert not alone & set(uploads.clients)  # no client is in two sums of a round
    assert all(experiment.store.get(client) == {} for client in alone)
    assert set(state.counters.repeated[0]["clients"]) >= alone | set(uploads.clients)


def test_an_aborted_round_without_other_clients_waits_for_the_missing_ones() -> None:
    """Half of four clients drop out of the first attempt; those that are there upload once."""
    experiment, state = witnessed(clients={"count": 4, "dropout": 0.0})
    transport = Recorder(experiment.rng)
    reach(experiment, transport)
    missing = {0: {0, 1}, 1: {0}}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            "perdure.training.round.remove_dropouts",
            lambda config, sampled, context: [
                c for c in sampled if c not in missing.get(context.attempt, ())
            ],
        )
        event = train_round(experiment, state)
    assert event["clients"] == 3
    at = {"task": 0, "round": 0, "attempt": 1}
    assert state.counters.repeated == [{**at, "clients": [1, 2, 3]}]
    assert len(transport.sent) == 3  # one upload per client
    assert {decode(call, SumRequest).digest for call in transport.calls} == {
        decode(transport.calls[0], SumRequest).digest
    }
    assert [experiment.store.get(client) for client in range(4)] == [{}, *[{"saw": 1}] * 3]


def _sampled(experiment: Experiment, state: RunState) -> list[int]:
    from perdure.training.sampling import sample_clients

    return sample_clients(experiment.config, experiment.task(0), experiment.context(state))


def test_the_precision_is_checked_against_the_weights_of_the_method() -> None:
    """PIP weights by participations and examples."""
    prompted = {
        **VALUES,
        "clients": {"count": 3, "partition": {"kind": "classes"}},
        "model": {"kind": "vit", "init": "random", "width": 8, "heads": 2, "depth": 5, "patch": 4},
        "stream": {"kind": "split", "tasks": 2, "classes_per_task": 3},
        "privacy": {**SECURE, "bits": 32, "precision": 27},
    }
    build_experiment(parse({**prompted, "method": {"kind": "pip", "weighted": False}}))
    with pytest.raises(
        UserError, match=r"privacy\.precision: must be at most .* and weights up to \d\d+, got 27"
    ):
        build_experiment(parse({**prompted, "method": {"kind": "pip"}}))


def test_a_run_stops_when_no_attempt_succeeds() -> None:
    experiment, state = witnessed(bad=tuple(range(6)), privacy={**SECURE, "attempts": 2})
    with pytest.raises(RunError, match="task 1 round 1: no secure sum in 2 attempts"):
        train_round(experiment, state)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"clients": {"count": 2}},
            "^privacy.secagg: must be False, .* at least 3 clients .* task 1 has 2 .*, got True",
        ),
        (
            {"clients": {"count": 9, "per_round": 2}},
            "at least 3 clients per round and task 1 has 2",
        ),
        (
            {"clients": {"count": 10, "dropout": 0.5}},
            "clients.dropout: must be small enough to leave 7 of 10 clients, .*, got 0.5",
        ),
        ({"privacy": {"secagg": True, "threshold": 0.5}}, "privacy.threshold: must be .*, got 0.5"),
        (
            {"privacy": {"secagg": True, "bits": 32}},
            "privacy.precision: must be at most 2. .*, got 30",
        ),
        ({"privacy": {"secagg": True, "bits": 16}}, "privacy.bits: must be 32 or 64, got 16"),
    ],
)
def test_a_config_that_cannot_be_secure_is_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        build_experiment(parse({**VALUES, "privacy": SECURE, **changes}))


def test_equal_weights_allow_a_higher_precision() -> None:
    values = {**VALUES, "clients": {"count": 4}}
    fine = {"secagg": True, "bits": 32, "precision": 29}
    build_experiment(parse({**values, "train": {"weighting": "uniform"}, "privacy": fine}))
    with pytest.raises(UserError, match=r"privacy\.precision: must be at most 2. .*, got 29"):
        build_experiment(parse({**values, "train": {"weighting": "samples"}, "privacy": fine}))


def test_a_resumed_run_equals_an_uninterrupted_run(tmp_path: Path) -> None:
    values = {**VALUES, "privacy": {**SECURE, "clip": 1.0, "noise": 0.1}}
    whole = perdure.run(values, out=tmp_path / "whole")

    class Stop(Exception):
        pass

    def stop(state: RunState, event: Any) -> None:
        if event["event"] == "round" and (state.task, state.round) == (1, 1):
            raise Stop

    with pytest.raises(Stop):
        perdure.run(values, out=tmp_path / "cut", watch=stop)
    again = perdure.resume(tmp_path / "cut")
    assert again.values["model_sha256"] == whole.values["model_sha256"]
    assert again.values["bytes"] == whole.values["bytes"]
    assert again.values["privacy"] == whole.values["privacy"]
    assert again.values["privacy"]["secagg"] is True


def test_plain_uploads_of_a_remote_engine_are_refused() -> None:
    class Elsewhere:
        def public_keys(self, task: int, clients: list[int]) -> dict[int, bytes]:
            return {client: bytes(32) for client in clients}

        def announce(self, call: bytes) -> None:
            pass

        def ask(self, requests: dict[int, bytes]) -> dict[int, bytes]:
            return {}

    experiment, state = witnessed()
    reach(experiment, Elsewhere())
    collector = collector_of(experiment, state, [0, 1, 2])
    with pytest.raises(RunError, match="not masked"):
        collector.add(StackedUploads((0,), (1.0,), {}))


def test_a_damaged_upload_is_a_failure_with_the_name_of_the_client() -> None:
    experiment, state = witnessed(clients={"count": 6})
    collector = collector_of(experiment, state, list(range(6)))
    collector.add(MaskedUpload(3, b"garbage"))
    update = {"w": torch.ones(6, 4)}
    others = StackedUploads((0, 1, 2, 4, 5), (1.0,) * 5, {"u": Sum({"w": update["w"][:5]})})
    collector.add(others)
    collector.close()
    assert [(f.client, f.answered) for f in collector.failures] == [(3, True)]
    assert "damaged" in collector.failures[0].reason
    assert collector.collected.total("u")["w"].tolist() == [5.0] * 4


def test_exchanges_without_uploads_need_no_sum() -> None:
    experiment, state = witnessed(method={"kind": "ewc"})
    collector = collector_of(experiment, state, [])
    collector.add(FailedUpload(1, "gone"))
    collector.empty_uploads = 2
    collector.close()
    assert collector.abort_reason is None
    assert state.ledger.by_field == {}


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "cryptography", None)
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    for privacy, key in ((SECURE, "secagg"), ({"clip": 1, "noise": 1}, "noise")):
        with pytest.raises(UserError, match=rf"{key}: requires pip install 'perdure\[privacy\]'"):
            build_experiment(parse({**VALUES, "privacy": privacy}))
    build_experiment(parse(VALUES))
