"""All runs of a comparison use one engine and one chunk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from perdure.config import load, parse
from perdure.core.errors import UserError
from perdure.runs.compare import compare as comparing
from perdure.runs.compare.common_settings import (
    EngineChoice,
    choose_engine,
    recorded_choice,
    with_engine_choice,
    with_existing_engines,
)
from perdure.runs.compare.compare import compare
from perdure.runs.compare.plan import PlannedRun, check_plan, plan
from perdure.runs.compare.processes import WorkerInputs, try_engine
from perdure.runs.compare.variants import read_methods, read_sweep
from perdure.runs.directory import RunDirectory
from perdure.runs.run import run
from perdure.runs.trial import find_engine
from perdure.training.settings import with_method_defaults

pytestmark = pytest.mark.slow

TINY: dict[str, Any] = {
    "data": {"source": "digits", "limit": 120},
    "stream": {"kind": "permuted", "tasks": 2},
    "clients": {"count": 4},
    "model": {"kind": "mlp", "hidden": [8]},
    "train": {"rounds": 1},
    "runs": {"report": False},
}
NONE, SERIAL, VECTOR = EngineChoice(), EngineChoice("serial"), EngineChoice("vector", 3)
BROKEN = """
from perdure.methods.fedavg import FedAvg

class Broken(FedAvg):
    def __post_init__(self):
        raise RuntimeError("this method fails")
"""


def _planned(engine: dict[str, Any], methods: str = "fedavg,fedprox") -> tuple[PlannedRun, ...]:
    return plan(TINY | {"engine": engine}, read_methods(methods), [0, 1])


def _never(run: PlannedRun) -> EngineChoice:
    raise AssertionError(f"{run.name} is tried")


def _engines(planned: tuple[PlannedRun, ...]) -> set[tuple[str, int | None]]:
    return {(run.config.engine.kind, _chunk(run.config.engine)) for run in planned}


def _chunk(engine: Any) -> int | None:
    return getattr(engine, "chunk", None)


def _used(out: Path) -> dict[str, tuple[str, int | None]]:
    """Engine and chunk of every run, as its result says it; its config must say the same."""
    found = {}
    for path in sorted(out.glob("*/*/result.json")):
        result, said = json.loads(path.read_text()), load(path.with_name("config.yaml")).engine
        assert (said.kind, _chunk(said)) == (result["engine"], result["chunk"])
        found[str(path.parent.relative_to(out))] = (result["engine"], result["chunk"])
    return found


def _record(out: Path) -> Any:
    return json.loads((out / "comparison.json").read_text())["engine"]


def test_all_runs_under_auto_use_one_engine_and_chunk(tmp_path: Path) -> None:
    outcome = compare(TINY, "fedavg,fedprox", [0, 1], out=tmp_path, references="none")
    used, record = _used(tmp_path), _record(tmp_path)
    assert not outcome.failures
    assert len(used) == 4
    assert set(used.values()) == {(record["kind"], record["chunk"])}


def test_the_recorded_choice_holds_for_what_is_resumed_and_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparing, "try_engine", lambda *_: VECTOR)
    compare(TINY, "fedavg", [0], out=tmp_path, references="none")
    monkeypatch.setattr(comparing, "try_engine", lambda *_: SERIAL)
    (tmp_path / "fedavg/seed-0/result.json").unlink()
    outcome = compare(TINY, "fedavg,fedprox", [0], out=tmp_path, references="none")
    assert not outcome.failures
    assert _record(tmp_path) == {"kind": "vector", "chunk": 3}
    expected = dict.fromkeys(("fedavg/seed-0", "fedprox/seed-0"), ("vector", 3))
    assert _used(tmp_path) == expected


@pytest.mark.parametrize(
    "engine", [{"kind": "serial"}, {"kind": "vector", "chunk": 2}, {"kind": "flower"}]
)
def test_an_engine_that_is_named_is_kept(tmp_path: Path, engine: dict[str, Any]) -> None:
    planned = _planned(engine)
    assert choose_engine(planned, tmp_path, NONE, _never) == NONE
    assert with_engine_choice(planned, tmp_path, VECTOR) == planned


def test_named_engines_run_without_a_trial_and_leave_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparing, "try_engine", _never)
    compare(TINY | {"engine": {"kind": "serial"}}, "fedavg", [0], out=tmp_path, references="none")
    assert _used(tmp_path) == {"fedavg/seed-0": ("serial", None)}
    assert _record(tmp_path) is None
    (tmp_path / "comparison.json").write_text(json.dumps({"engine": VECTOR.to_dict()}))
    compare(TINY | {"engine": {"kind": "serial"}}, "fedavg", [0], out=tmp_path, references="none")
    assert _record(tmp_path) == VECTOR.to_dict()


def test_vector_without_a_chunk_gets_one_chunk_for_all(tmp_path: Path) -> None:
    planned = _planned({"kind": "vector"})
    tried = []

    def ask(run: PlannedRun) -> EngineChoice:
        tried.append(run.name)
        return EngineChoice("vector", 5)

    choice = choose_engine(planned, tmp_path, NONE, ask)
    assert _engines(with_engine_choice(planned, tmp_path, choice)) == {("vector", 5)}
    assert tried == ["fedavg/seed-0"]


def test_a_sweep_over_engines_and_chunks_is_kept(tmp_path: Path) -> None:
    sweeps = [read_sweep("engine.kind=auto,vector"), read_sweep("engine.chunk=2,null")]
    planned = plan(TINY, read_methods("fedavg"), [0], sweeps)

    def ask(run: PlannedRun) -> EngineChoice:
        return EngineChoice("vector", 7) if run.config.engine.kind == "vector" else SERIAL

    choice = choose_engine(planned, tmp_path, NONE, ask)
    found = [run.config.engine for run in with_engine_choice(planned, tmp_path, choice)]
    assert [each.kind for each in found] == ["serial"] * 2 + ["vector"] * 2
    assert [_chunk(each) for each in found] == [None, None, 2, 7]


def test_a_sweep_over_chunks_of_an_engine_that_has_none_is_refused() -> None:
    sweeps = [read_sweep("engine.kind=serial,vector"), read_sweep("engine.chunk=2,null")]
    with pytest.raises(UserError, match=r"^engine\.chunk: unknown key for kind 'serial', got 2"):
        plan(TINY, read_methods("fedavg"), [0], sweeps)


def test_a_method_whose_trial_fails_leaves_the_choice_to_the_next(tmp_path: Path) -> None:
    planned = _planned({"kind": "auto"})
    answers = {"fedprox": VECTOR}
    choice = choose_engine(planned, tmp_path, NONE, lambda run: answers.get(run.label, NONE))
    assert choice == VECTOR
    assert choose_engine(planned, tmp_path, NONE, lambda _: NONE) == SERIAL


def test_runs_of_before_keep_auto_and_their_choice_holds_for_new_ones(tmp_path: Path) -> None:
    finished, begun, *new = planned = _planned({"kind": "auto"})
    values = run(finished.config, out=finished.path(tmp_path)).values
    RunDirectory.create(
        begun.path(tmp_path), with_method_defaults(begun.config), resume=False
    ).close()
    known = recorded_choice(planned, tmp_path)
    assert known == EngineChoice(values["engine"], values["chunk"])
    taken = with_existing_engines(planned, tmp_path)
    check_plan(taken, tmp_path)
    assert choose_engine(taken, tmp_path, known, _never) == known
    after = with_engine_choice(taken, tmp_path, known)
    assert _engines(after[:2]) == {("auto", None)}
    assert _engines(after[2:]) == {(known.kind, known.chunk)}
    assert len(after) == 2 + len(new)


def test_runs_know_the_choice_where_its_record_is_lost(tmp_path: Path) -> None:
    (tmp_path / "comparison.json").write_text("{")
    planned = _planned({"kind": "auto"})
    first = with_engine_choice(planned, tmp_path, VECTOR)[0]
    RunDirectory.create(
        first.path(tmp_path), with_method_defaults(first.config), resume=False
    ).close()
    assert recorded_choice(planned, tmp_path) == VECTOR
    check_plan(with_existing_engines(planned, tmp_path), tmp_path)


def test_another_engine_than_that_of_the_folder_is_refused(tmp_path: Path) -> None:
    first = with_engine_choice(_planned({"kind": "auto"}), tmp_path, VECTOR)[0]
    RunDirectory.create(
        first.path(tmp_path), with_method_defaults(first.config), resume=False
    ).close()
    for engine, key in (({"kind": "serial"}, "kind"), ({"kind": "auto", "chunk": 9}, "chunk")):
        with pytest.raises(UserError, match=rf"engine\.{key}"):
            check_plan(with_existing_engines(_planned(engine), tmp_path), tmp_path)


@pytest.mark.parametrize("said", ["[]", "{}", '{"engine": null}', '{"engine": {"kind": "auto"}}'])
def test_a_folder_without_a_record_has_no_choice(tmp_path: Path, said: str) -> None:
    (tmp_path / "comparison.json").write_text(said)
    assert recorded_choice(_planned({"kind": "auto"}), tmp_path) == NONE


def test_what_a_trial_finds() -> None:
    auto = find_engine(parse(TINY))
    assert auto["kind"] in ("serial", "vector")
    assert not parse({"engine": auto}).engine.is_open
    assert find_engine(parse(TINY | {"engine": {"kind": "auto", "chunk": 2}}))["chunk"] in (None, 2)
    sized = find_engine(parse(TINY | {"engine": {"kind": "vector"}}))
    larger = find_engine(
        parse(TINY | {"engine": {"kind": "vector"}, "model": {"kind": "mlp", "hidden": [800]}})
    )
    assert sized["kind"] == larger["kind"] == "vector"
    assert sized["chunk"] > larger["chunk"] >= 2


def test_a_trial_finds_a_method_beside_the_file_and_survives_its_failure(tmp_path: Path) -> None:
    (tmp_path / "broken_in_trial.py").write_text(BROKEN)
    methods = read_methods("broken_in_trial.Broken")
    values = TINY | {"engine": {"kind": "vector"}}
    (failing,) = plan(values, methods, [0], method_dir=tmp_path)
    assert try_engine(failing, 1, WorkerInputs((str(tmp_path),))) == NONE
    (tmp_path / "sound_in_trial.py").write_text(BROKEN.replace("raise", "return; raise"))
    (sound,) = plan(values, read_methods("sound_in_trial.Broken"), [0], method_dir=tmp_path)
    assert try_engine(sound, 1, WorkerInputs((str(tmp_path),))).kind == "vector"
