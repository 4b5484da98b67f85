"""What a comparison varies, and the runs that follow from it."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from perdure.config import dump_saved
from perdure.core.errors import UserError
from perdure.runs.compare.plan import PlannedRun, check_plan, plan
from perdure.runs.compare.variants import MethodChoice, Sweep, read_methods, read_seeds, read_sweep
from perdure.runs.directory import RunDirectory
from perdure.training.settings import with_method_defaults

BASE = {"train": {"lr": 0.3}, "method": {"kind": "fot", "threshold": 0.7}}


def _labels(methods: str, *sweeps: Sweep) -> list[str]:
    return [run.label for run in plan(BASE, read_methods(methods), [0], sweeps)]


def test_values_may_hold_the_signs_that_separate() -> None:
    (choice,) = read_methods("special:with=[{kind: er, memory: 3}, {kind: fot}]:lambda=2")
    assert choice.keys == {"with": [{"kind": "er", "memory": 3}, {"kind": "fot"}], "lambda": 2}


def test_keys_of_the_files_method_hold_for_its_kind_alone() -> None:
    runs = {run.label: run.config for run in plan(BASE, read_methods("fedavg,fot"), [0])}
    assert runs["fedavg"].method == {"kind": "fedavg"}
    assert runs["fot"].method == {"kind": "fot", "threshold": 0.7}
    assert {config.train.lr for config in runs.values()} == {0.3}


def test_a_methods_own_key_wins_over_the_file_and_a_sweep_over_both() -> None:
    (own,) = plan(BASE, read_methods("fot:threshold=0.8"), [0])
    (swept,) = plan(
        BASE, read_methods("fot:threshold=0.8"), [0], [Sweep("method.threshold", (0.9,))]
    )
    assert own.config.method["threshold"] == 0.8
    assert swept.config.method["threshold"] == 0.9


def test_a_sweep_of_a_hyper_parameter_is_for_the_methods_that_have_it() -> None:
    sweep = read_sweep("method.threshold=0.8,0.9")
    assert _labels("fedavg,fot", sweep) == ["fedavg", "fot-threshold=0.8", "fot-threshold=0.9"]


def test_sweeps_are_combined() -> None:
    found = _labels("fedavg", Sweep("train.lr", (0.1, 0.2)), Sweep("train.rounds", (1, 2)))
    assert found == [
        "fedavg-train.lr=0.1-train.rounds=1",
        "fedavg-train.lr=0.1-train.rounds=2",
        "fedavg-train.lr=0.2-train.rounds=1",
        "fedavg-train.lr=0.2-train.rounds=2",
    ]


def test_steps_of_the_server_are_swept_for_all_methods() -> None:
    sweep = read_sweep("train.server_schedule=constant,1/k,1/sqrt(k)")
    assert _labels("special", sweep) == [
        "special-train.server_schedule=constant",
        "special-train.server_schedule=1-over-k",
        "special-train.server_schedule=1-over-sqrt-k",
    ]
    runs = plan(BASE, read_methods("fedavg,flwf-2t"), [0], [sweep])
    found = [run.config.train.server_schedule for run in runs]
    assert found == ["constant", "1/k", "1/sqrt(k)"] * 2


def test_every_seed_of_every_method_seed_by_seed() -> None:
    runs = plan(BASE, read_methods("fedavg,fot"), read_seeds("3-4"))
    assert [run.name for run in runs] == [
        "fedavg/seed-3", "fot/seed-3", "fedavg/seed-4", "fot/seed-4",
    ]  # fmt: skip
    assert [run.config.seed for run in runs] == [3, 3, 4, 4]


def test_labels_are_names_of_folders_everywhere() -> None:
    (run,) = plan({}, [MethodChoice("fedprox", {"mu": 1}, name='a "b" / c:d')], [0])
    assert run.label == "a-b-c-d"


@pytest.mark.parametrize("text", ["", ",", "fot:threshold", "fot:=3", "fot:threshold=[1"])
def test_methods_that_cannot_be_read(text: str) -> None:
    with pytest.raises(UserError, match=r"methods.*: must"):
        read_methods(text)


@pytest.mark.parametrize("text", ["", "a", "0,0", "1.5", "3-1", "-1"])
def test_seeds_that_cannot_be_read(text: str) -> None:
    with pytest.raises(UserError, match="seeds: must"):
        read_seeds(text)


@pytest.mark.parametrize("text", ["", "train.lr", "=3", "train.lr=", "seed=1,2", "train.lr=1,1"])
def test_sweeps_that_cannot_be_read(text: str) -> None:
    with pytest.raises(UserError, match="sweeps"):
        read_sweep(text)


def test_a_key_that_no_method_has_and_a_method_twice_are_refused() -> None:
    with pytest.raises(
        UserError, match=r"sweeps: must be a hyperparameter of fedavg or fot, got 'method\.kappa'"
    ):
        _labels("fedavg,fot", read_sweep("method.kappa=1,2"))
    with pytest.raises(UserError, match="methods: must name each method once, got fedavg twice"):
        _labels("fedavg,fedavg")


def test_a_changed_config_and_an_unsupported_pair_are_refused(tmp_path: Path) -> None:
    (old,) = plan({"train": {"lr": 0.1}}, read_methods("fedavg"), [0])
    old.path(tmp_path).mkdir(parents=True)
    (old.path(tmp_path) / "config.yaml").write_text(dump_saved(with_method_defaults(old.config)))
    check_plan([old], tmp_path)
    (new,) = plan({"train": {"lr": 0.2}}, read_methods("fedavg"), [0])
    with pytest.raises(UserError, match=r"train\.lr: must be 0\.1 as in .*, got 0\.2"):
        check_plan([new], tmp_path)
    bad = plan({"model": {"hidden": []}, "data": {"limit": 1}}, read_methods("fedavg"), [0])
    with pytest.raises(UserError):
        check_plan(bad, tmp_path / "elsewhere")


def test_a_method_beside_the_file_may_be_swept_and_may_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key that its class got after a run is no reason to refuse the run."""
    name = "own_of_a_plan"
    text = (
        "from dataclasses import dataclass\nfrom perdure import Method\n"
        "@dataclass(frozen=True)\nclass Mine(Method):\n    strength: float = 0.5\n"
    )
    (tmp_path / f"{name}.py").write_text(text)
    sweep = Sweep("method.strength", (0.5, 2.0))
    first, second = plan(BASE, read_methods(f"{name}.Mine"), [0], [sweep], tmp_path)
    assert [run.config.method["strength"] for run in (first, second)] == [0.5, 2.0]
    folder = first.path(tmp_path)
    RunDirectory.create(folder, with_method_defaults(first.config, tmp_path), resume=False).close()
    (tmp_path / f"{name}.py").write_text(text + "    extra: float = 1.0\n")
    monkeypatch.delitem(sys.modules, name)
    importlib.invalidate_caches()
    check_plan([first], tmp_path, tmp_path)
    with pytest.raises(UserError, match=r"method\.strength: must be 0\.5 as in .*, got 2\.0"):
        check_plan([PlannedRun(first.label, second.config)], tmp_path, tmp_path)
    monkeypatch.delitem(sys.modules, name)
