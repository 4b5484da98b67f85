"""Runs from start to end: stopped anywhere, resumed, and bit for bit the same."""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import perdure
from perdure.config import load, parse
from perdure.contract import (
    Change,
    Client,
    ClientResult,
    CollectedUploads,
    Context,
    Diagnosis,
    Exchange,
    LocalUpdate,
    Method,
    Prepared,
    Proximal,
    Server,
    Step,
    Sum,
    Train,
)
from perdure.core.errors import RunError, UserError
from perdure.core.files import hash_name
from perdure.core.trees import SUFFIX
from perdure.evaluation.forgetting import metrics
from perdure.runs import checkpoint
from perdure.training.settings import with_method_defaults

VALUES: dict[str, Any] = {
    "data": {"limit": 90},
    "stream": {"kind": "split", "tasks": 2, "classes_per_task": 3},
    "clients": {"count": 4, "per_round": 3, "partition": {"kind": "dirichlet"}, "dropout": 1 / 3},
    "model": {"hidden": [6], "dropout": 0.2},
    "train": {"rounds": 3, "batch_size": 8, "momentum": 0.5, "schedule": {"kind": "cosine"}},
    "engine": {"kind": "serial"},
    "runs": {"evaluate_every": 2},
}
STEPS = 8
"""Rounds and task ends of the whole run."""


@dataclass(frozen=True)
class Speed:
    """What the server remembers."""

    momentum: torch.Tensor | None = None
    rounds: int = 0


@dataclass(frozen=True)
class Drift:
    """What a client remembers."""

    drift: torch.Tensor | None = None


@dataclass(frozen=True)
class Stateful(Method):
    """Server and clients remember what they did; a fault can be switched on."""

    faulty: ClassVar[bool] = False
    ServerState: ClassVar[type] = Speed
    ClientState: ClassVar[type] = Drift

    def exchanges(self, context: Context) -> list[Exchange | Train]:
        return [
            Exchange("start", "none", aggregate=self.start),
            Train(make_upload=self.upload, adjust=self.adjust),
            Exchange("count", client_work=self.count, aggregate=self.ignore),
        ]

    def start(self, server: Server, uploads: CollectedUploads, context: Context) -> Server:
        if context.task:
            return server
        return replace(server, state=Speed(torch.zeros_like(server.params["fc1.bias"])))

    def upload(self, client: Client, local: LocalUpdate) -> ClientResult:
        drift = torch.zeros(6) if client.state.drift is None else client.state.drift
        update = local.update | {"fc1.bias": local.update["fc1.bias"] + 0.1 * drift}
        if Stateful.faulty and client.context.task == 1 and client.context.round == 1:
            update = {name: value * float("nan") for name, value in update.items()}
        return ClientResult({"update": Sum(update)}, Drift(drift + update["fc1.bias"]))

    def adjust(
        self, server: Server, change: Change, uploads: CollectedUploads, context: Context
    ) -> Change:
        speed = 0.9 * server.state.momentum + change.params["fc1.bias"]
        state = Speed(speed, server.state.rounds + 1)
        return replace(change, params=change.params | {"fc1.bias": speed}, state=state)

    def count(self, client: Client) -> ClientResult:
        return ClientResult({"n": Sum({"n": torch.tensor(float(len(client.data)))})})

    def ignore(self, server: Server, uploads: CollectedUploads, context: Context) -> Server:
        return server

    def diagnose(self, server: Server, context: Context) -> Diagnosis:
        return Diagnosis({"speed": float(server.state.momentum.norm()), "n": server.state.rounds})


STATEFUL = {**VALUES, "method": {"kind": f"{__name__}.Stateful"}}
VARIANTS = {
    "fedavg": VALUES,
    "cumulative": VALUES | {"stream": VALUES["stream"] | {"cumulative": True}},
    "stateful": STATEFUL,
    "sparse checkpoints": {**STATEFUL, "runs": {"checkpoint_every": 2, "evaluate_every": 1}},
    "growing": {**VALUES, "model": {"hidden": [6], "head": "growing", "norm": "batch"}},
    "vector": {**VALUES, "train": {"rounds": 3, "batch_size": 8}, "engine": {"kind": "vector"}},
    "auto": {**VALUES, "engine": {"kind": "auto"}},
}


@dataclass(frozen=True)
class Seen:
    """Numbers as keys and a tuple, which no file can hold as they are."""

    seen: dict[int, tuple[torch.Tensor, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Counting(Method):
    """Its updates depend on the keys of its state, and on how its tensors lie in memory."""

    ServerState: ClassVar[type] = Seen

    def exchanges(self, context: Context) -> list[Exchange | Train]:
        return [Exchange("begin", "none", aggregate=self.begin), Train(adjust=self.adjust)]

    def begin(self, server: Server, uploads: CollectedUploads, context: Context) -> Server:
        seen = server.state.seen | {context.task: (torch.ones(6, 2).T,)}
        return replace(server, state=Seen(seen))

    def adjust(
        self, server: Server, change: Change, uploads: CollectedUploads, context: Context
    ) -> Change:
        seen = server.state.seen
        factor = 1.0 if context.task in seen else 0.5
        factor += sum(held[0].is_contiguous() + isinstance(held, tuple) for held in seen.values())
        params = {name: factor * value for name, value in change.params.items()}
        return replace(change, params=params)


@dataclass(frozen=True)
class LooksInTheFirstTask(Method):
    """A loss that cannot be vectorized, in the first task alone."""

    def exchanges(self, context: Context) -> list[Exchange | Train]:
        return [Train() if context.task else Train(loss=self.loss)]

    def loss(self, step: Step) -> torch.Tensor:
        rows = step.cross_entropy(step.logits())
        return 2 * rows if float(rows.detach().mean()) > 0 else rows


@dataclass(frozen=True)
class Rising(Method):
    """A pull that changes from round to round, so that the vector engine learns that it does."""

    def exchanges(self, context: Context) -> list[Exchange | Train]:
        return [Train(prepare=self.hold_near)]

    def hold_near(self, client: Client) -> Prepared:
        strength = 0.137 * (1 + client.context.round + 5 * client.context.task) ** 1.3
        return Prepared(transforms=(Proximal(client.params, strength, implicit=True),))


VARIANTS["rising"] = {**VARIANTS["vector"], "method": {"kind": f"{__name__}.Rising"}}
VARIANTS["rising"] |= {"train": {"rounds": 3, "batch_size": 8, "lr": 0.037}}
VARIANTS["falls back"] = {
    **VARIANTS["vector"], "method": {"kind": f"{__name__}.LooksInTheFirstTask"}
}  # fmt: skip
VARIANTS["counting"] = {**VALUES, "method": {"kind": f"{__name__}.Counting"}}
for kind in "fot", "fedprotip":  # subspaces above half, of which the complement is stored
    VARIANTS[kind] = {
        **VALUES,
        "data": {"limit": 400},
        "stream": {"tasks": 2},
        "model": {"hidden": [60]},
        "method": {"kind": kind, "threshold": 0.99},
    }


class Stopped(BaseException):
    """Stands for Ctrl-C at some point."""


def stop_after(steps: int) -> Any:
    """A watch that ends the process's part after so many events."""
    left = [steps]

    def watch(state: Any, event: Any) -> None:
        left[0] -= 1
        if not left[0]:
            raise Stopped

    return watch


def outcome(folder: Path) -> tuple[Any, bytes]:
    """All of result.json that does not depend on the clock, and the bytes of the events."""
    result = json.loads((folder / "result.json").read_text())
    for changing in ("seconds", "peak_rss_mb"):
        del result[changing]
    return result, (folder / "events.jsonl").read_bytes()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the outcome of the run without a stop, by variant, trained once."""
    found: dict[str, Any] = {}

    def of(variant: str) -> Any:
        if variant not in found:
            folder = tmp_path_factory.mktemp("whole") / "run"
            perdure.run(VARIANTS[variant], out=folder)
            found[variant] = (*outcome(folder), folder)
        return found[variant]

    return of


def stopped_at(folder: Path, values: dict[str, Any], steps: int) -> None:
    with pytest.raises(Stopped):
        perdure.run(values, out=folder, watch=stop_after(steps))


@pytest.mark.parametrize(
    ("variant", "moments"),
    [
        ("stateful", range(1, STEPS + 1)),
        ("sparse checkpoints", range(1, STEPS + 1)),
        ("growing", (3, 4, 5)),
        ("fedavg", (2, 8)),
        ("counting", (1, 5, 6)),
        ("fot", (6,)),
        ("cumulative", (6,)),
        ("fedprotip", (6,)),
    ],
    ids=str,
)
def test_a_run_stopped_at_any_step_and_resumed_ends_alike(
    variant: str, moments: Any, whole: Any, tmp_path: Path
) -> None:
    for steps in moments:
        folder = tmp_path / str(steps)
        stopped_at(folder, VARIANTS[variant], steps)
        assert not (folder / "result.json").exists()
        perdure.resume(folder)
        assert outcome(folder) == whole(variant)[:2], steps


@pytest.mark.parametrize("variant", ["vector", "rising", "falls back", "auto"])
def test_resumed_runs_of_other_engines_end_alike(variant: str, whole: Any, tmp_path: Path) -> None:
    if variant == "auto":  # the choice depends on the machine, so both runs resume from one
        stopped_at(tmp_path / "one", VARIANTS[variant], 3)
        shutil.copytree(tmp_path / "one", tmp_path / "other")
        results = [perdure.resume(tmp_path / name) for name in ("one", "other")]
        assert results[0].values["engine"] == results[1].values["engine"] in ("serial", "vector")
        assert outcome(tmp_path / "one") == outcome(tmp_path / "other")
        chosen, chunk = {"kind": results[0].values["engine"]}, results[0].values["chunk"]
        chosen |= {} if chunk is None else {"chunk": chunk}
        again = perdure.run({**VALUES, "engine": chosen})
        assert again.values["model_sha256"] == results[0].values["model_sha256"]
        return
    stopped_at(tmp_path / "run", VARIANTS[variant], 5)
    perdure.resume(tmp_path / "run")
    assert outcome(tmp_path / "run") == whole(variant)[:2]


def test_a_run_stopped_after_every_step_ends_alike(whole: Any, tmp_path: Path) -> None:
    stopped_at(tmp_path / "run", STATEFUL, 1)
    for _ in range(STEPS - 1):
        with pytest.raises(Stopped):
            perdure.resume(tmp_path / "run", watch=stop_after(1))
    perdure.resume(tmp_path / "run")
    assert outcome(tmp_path / "run") == whole("stateful")[:2]


@pytest.mark.parametrize("steps", [2, 4, 7])
@pytest.mark.parametrize("harm", ["altered", "truncated", "missing"])
def test_an_invalid_checkpoint_is_skipped_for_the_previous_one(
    steps: int, harm: str, whole: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "run"
    stopped_at(folder, STATEFUL, steps)
    newest, before = checkpoint.paths(folder / "checkpoints")
    data = newest.read_bytes()
    if harm == "altered":
        newest.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    elif harm == "truncated":
        newest.write_bytes(data[: len(data) // 2])
    else:
        newest.unlink()
    with caplog.at_level(logging.INFO):
        perdure.resume(folder)
    assert outcome(folder) == whole("stateful")[:2]
    if harm != "missing":
        assert any(
            newest.name in r.getMessage() and r.levelname == "WARNING" for r in caplog.records
        )
    assert not any(before.name in r.getMessage() for r in caplog.records)


@pytest.mark.parametrize("harm", ["truncated", "missing"])
def test_a_checkpoint_with_a_damaged_client_state_is_skipped(
    harm: str, whole: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "run"
    stopped_at(folder, STATEFUL, 3)
    newest, before = checkpoint.paths(folder / "checkpoints")
    named, old = (set(checkpoint.read(path)["clients"].values()) for path in (newest, before))
    path = folder / "clients" / min(named - old)
    path.unlink() if harm == "missing" else path.write_bytes(path.read_bytes()[:-1])
    perdure.resume(folder)
    assert outcome(folder) == whole("stateful")[:2]
    (warning,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert newest.name in warning
    assert path.name in warning


def test_without_a_valid_checkpoint_a_run_starts_over(whole: Any, tmp_path: Path) -> None:
    stopped_at(tmp_path / "run", STATEFUL, 5)
    for path in checkpoint.paths(tmp_path / "run" / "checkpoints"):
        path.write_bytes(b"nothing")
    perdure.resume(tmp_path / "run")
    assert outcome(tmp_path / "run") == whole("stateful")[:2]


def test_events_after_the_checkpoint_are_removed(whole: Any, tmp_path: Path) -> None:
    stopped_at(tmp_path / "run", STATEFUL, 3)
    with (tmp_path / "run" / "events.jsonl").open("ab") as file:
        file.write(b'{"event": "round", "task": 9}\n{"half": ')
    perdure.resume(tmp_path / "run")
    assert outcome(tmp_path / "run") == whole("stateful")[:2]


def test_states_that_no_checkpoint_needs_are_removed(whole: Any, tmp_path: Path) -> None:
    """A process that is killed after its last checkpoint leaves states of clients behind."""
    shutil.copytree(whole("stateful")[2], tmp_path / "run")
    clients = tmp_path / "run" / "clients"
    kept = sorted(clients.iterdir())
    shutil.copy(kept[0], clients / hash_name(0, b"an earlier state", SUFFIX))
    perdure.resume(tmp_path / "run")
    assert sorted(clients.iterdir()) == kept


def test_checkpoints_that_are_no_longer_kept_are_removed_with_their_states(
    whole: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is killed when it has written its last checkpoint leaves an older one."""

    def die(folder: Path, keep: int) -> None:
        raise Stopped

    def watch(state: Any, event: Any) -> None:
        events.append(event)
        if len(events) == STEPS - 1:
            monkeypatch.setattr(checkpoint, "prune", die)

    events: list[Any] = []
    with pytest.raises(Stopped):
        perdure.run(STATEFUL, out=tmp_path / "run", watch=watch)
    monkeypatch.undo()
    assert len(checkpoint.paths(tmp_path / "run" / "checkpoints")) == 3
    perdure.resume(tmp_path / "run")
    assert left_files(tmp_path / "run") == left_files(whole("stateful")[2])


def left_files(folder: Path) -> tuple[list[int], list[str]]:
    """The numbers of the checkpoints and the names of the client states."""
    numbers = [checkpoint.number_of(path) for path in checkpoint.paths(folder / "checkpoints")]
    return numbers, sorted(path.name for path in (folder / "clients").iterdir())


def test_resuming_a_finished_run_changes_nothing(whole: Any, tmp_path: Path) -> None:
    shutil.copytree(whole("stateful")[2], tmp_path / "run")
    result = perdure.resume(tmp_path / "run")
    assert outcome(tmp_path / "run") == whole("stateful")[:2]
    assert result.values["model_sha256"] == whole("stateful")[0]["model_sha256"]


def test_when_no_update_is_finite_the_run_stops_and_can_be_resumed(
    whole: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "run"
    monkeypatch.setattr(Stateful, "faulty", True)
    for resume in (False, True):  # the fault remains when it is resumed
        with pytest.raises(RunError) as failure:
            perdure.run(STATEFUL, out=folder, resume=resume)
        assert failure.value.exit_code == 1
        assert "task 2 round 2: no client's update is finite" in str(failure.value)
    assert "task 2 round 2: the update of client" in caplog.text
    assert not (folder / "result.json").exists()
    monkeypatch.setattr(Stateful, "faulty", False)
    perdure.resume(folder)
    assert outcome(folder) == whole("stateful")[:2]


@dataclass(frozen=True)
class OneBad(Method):
    """Client 1 never sends anything finite."""

    def exchanges(self, context: Context) -> list[Exchange | Train]:
        return [Train(make_upload=self.upload)]

    def upload(self, client: Client, local: LocalUpdate) -> ClientResult:
        factor = float("inf") if client.id == 1 else 1.0
        update = {name: value * factor for name, value in local.update.items()}
        return ClientResult({"update": Sum(update)})


def test_rejected_updates_are_counted_in_the_result(tmp_path: Path) -> None:
    values = {**VALUES, "clients": {"count": 3}, "method": {"kind": f"{__name__}.OneBad"}}
    perdure.run(values, out=tmp_path / "run")
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["rejected_updates"] == [
        {"task": task, "round": round_, "client": 1} for task in range(2) for round_ in range(3)
    ]
    assert result["client_updates"] == 12
    assert result["rounds"] == 6


def test_without_out_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = perdure.run(STATEFUL)
    assert result.path is None
    assert not list(tmp_path.iterdir())


def test_with_and_without_out_the_result_is_the_same(whole: Any) -> None:
    values = json.loads(json.dumps(perdure.run(STATEFUL).values))
    expected = whole("stateful")[0]
    assert {key: values[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("change", "expected", "got"),
    [
        ({"seed": 1}, "seed: must be 0 as in ", ", got 1"),
        ({"train": {**VALUES["train"], "lr": 0.2}}, "train.lr: must be 0.1 as in ", ", got 0.2"),
        (
            {"method": {"kind": "fedprox"}},
            "method.kind: must be 'fedavg' as in ",
            ", got 'fedprox'",
        ),
        ({"engine": {"kind": "vector"}}, "engine.kind: must be 'serial' as in ", ", got 'vector'"),
    ],
    ids=str,
)
def test_another_config_is_refused(
    change: Any, expected: str, got: str, tmp_path: Path, whole: Any
) -> None:
    folder = tmp_path / "run"
    stopped_at(folder, VALUES, 2)
    before = {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
    with pytest.raises(UserError) as refusal:
        perdure.run({**VALUES, **change}, out=folder, resume=True)
    assert str(refusal.value).startswith(expected)
    assert str(refusal.value).endswith(got)
    after = {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
    assert after == before
    perdure.run(VALUES, out=folder, resume=True)
    assert outcome(folder) == whole("fedavg")[:2]


def test_the_config_of_a_run_has_the_defaults_of_its_method(tmp_path: Path) -> None:
    """For a run to stay the same when a later version has other defaults."""
    values = {**VALUES, "method": {"kind": "lwf", "temperature": 1.5}}
    stopped_at(tmp_path / "run", values, 1)
    kept = load(tmp_path / "run" / "config.yaml")
    assert kept.method == {"kind": "lwf", "lambda": 1.0, "temperature": 1.5}
    assert (kept.model.head, kept.train.outputs) == ("growing", "task")


def test_another_number_of_threads_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stopped_at(tmp_path / "run", VALUES, 2)
    perdure.resume(tmp_path / "run")
    assert "threads" not in caplog.text
    stopped_at(tmp_path / "other", VALUES, 2)
    now = torch.get_num_threads()
    monkeypatch.setattr(torch, "get_num_threads", lambda: now + 7)
    assert perdure.resume(tmp_path / "other").values["threads"] == now + 7
    assert f"started with {now} threads and continues with {now + 7}" in caplog.text


def test_an_existing_run_is_not_overwritten(whole: Any) -> None:
    folder = whole("fedavg")[2]
    with pytest.raises(UserError, match="use resume=True, overwrite=True or another out"):
        perdure.run(VALUES, out=folder)
    assert outcome(folder) == whole("fedavg")[:2]


def test_only_a_run_directory_can_be_resumed(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a run directory"):
        perdure.resume(tmp_path)
    with pytest.raises(UserError, match="not a run directory"):
        perdure.run(VALUES, out=tmp_path / "new", resume=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "change",
    [
        {"method": {"kind": "no-such"}},
        {"method": {"kind": "fedprox", "mu": -1}},
        {"stream": {"kind": "split", "tasks": 2, "classes_per_task": 8}},
        {"data": {"source": "npz", "path": "no/such.npz"}},
        {"clients": {"count": 100}},
        {"train": {"rounds": 0}},
    ],
    ids=str,
)
def test_a_refused_config_writes_nothing(change: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError) as mistake:
        perdure.run({**VALUES, **change}, out=tmp_path / "run")
    assert mistake.value.exit_code == 2
    assert not list(tmp_path.iterdir())


def test_the_result_has_all_documented_keys(whole: Any) -> None:
    result = json.loads((whole("stateful")[2] / "result.json").read_text())
    assert {
        "perdure", "method", "seed", "tasks", "engine", "matrix", "metrics", "bytes", "seconds",
        "rounds", "client_updates", "peak_rss_mb", "model_sha256",
    } <= set(result)  # fmt: skip
    assert (result["tasks"], result["rounds"], result["engine"]) == (2, 6, "serial")
    assert result["chunk"] is None
    assert result["matrix"]["routed"] is None
    assert result["metrics"]["routed"] is None
    for mode in ("task_agnostic", "task_aware"):
        assert result["metrics"][mode] == metrics(result["matrix"][mode])
    assert set(result["seconds"]) == {"total", "train", "consolidate", "evaluate", "by_task"}
    assert sum(result["seconds"]["by_task"]) == pytest.approx(result["seconds"]["total"], abs=0.01)
    sent = result["bytes"]
    assert set(sent) == {"up", "down", "by_task", "by_field", "types", "per_client", "kept"}
    for task in sent["by_task"]:
        assert sum(task["by_field"].values()) == task["up"] + task["down"]
        assert task["per_client"]["up"]["mean"] * task["per_client"]["clients"] == task["up"]
    assert sent["per_client"]["up"]["mean"] * sent["per_client"]["clients"] == sent["up"]
    assert set(result["forgetting"]) == set(result["matrix"])
    assert result["forgetting"]["task_agnostic"][-1] == result["metrics"]["task_agnostic"]["AF"]
    # three of four sampled, one of them lost in every round; all four in the extra rounds
    assert (result["client_updates"], result["missing_reports"]) == (12, 6)


def test_the_bytes_that_clients_keep_are_those_of_their_files(whole: Any) -> None:
    folder = whole("stateful")[2]
    kept = json.loads((folder / "result.json").read_text())["bytes"]["kept"]
    manifest = checkpoint.read(checkpoint.paths(folder / "checkpoints")[-1])["clients"]
    sizes = [(folder / "clients" / name).stat().st_size for name in manifest.values()]
    assert kept["by_task"][-1] == {"mean": sum(sizes) / 4, "max": max(sizes)}
    assert {key: kept[key] for key in ("mean", "max")} == kept["by_task"][-1]


def test_a_run_directory_contains_the_documented_files(whole: Any) -> None:
    folder = whole("stateful")[2]
    assert {"config.yaml", "events.jsonl", "result.json", "checkpoints", "clients", "model"} <= {
        path.name for path in folder.iterdir()
    }
    assert len(checkpoint.paths(folder / "checkpoints")) == 2
    named: set[str] = set()
    tasks = checkpoint.paths(folder / "checkpoints/tasks")
    for path in (*checkpoint.paths(folder / "checkpoints"), *tasks):
        named |= set(checkpoint.read(path)["clients"].values())
    assert {path.name for path in (folder / "clients").iterdir()} == named
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert len(events) == STEPS
    assert [event["method"]["n"] for event in events] == [1, 2, 3, 3, 4, 5, 6, 6]


def test_the_config_of_a_run_is_complete(whole: Any) -> None:
    found = perdure.runs.directory.RunDirectory.open(whole("fedavg")[2]).config()
    assert found == with_method_defaults(parse(VALUES))
    text = (whole("fedavg")[2] / "config.yaml").read_text()
    assert "weight_decay: 0.0" in text
    assert "null" not in "".join(line for line in text.splitlines() if "head:" in line)


def test_watch_is_called_after_every_round_and_task() -> None:
    seen: list[Any] = []
    perdure.run(
        VALUES, watch=lambda state, event: seen.append((state.checkpoint_number, event["event"]))
    )
    assert [kind for _, kind in seen] == (["round"] * 3 + ["task"]) * 2
    assert [steps for steps, _ in seen] == list(range(1, STEPS + 1))


def test_a_config_file_and_its_values_are_the_same_run(tmp_path: Path, whole: Any) -> None:
    path = tmp_path / "config.json.yaml"
    path.write_text(json.dumps(VALUES))
    assert perdure.run(path).values["model_sha256"] == whole("fedavg")[0]["model_sha256"]
    assert (
        perdure.run(parse(VALUES)).values["model_sha256"] == whole("fedavg")[0]["model_sha256"]
    )  # fmt: skip
