"""One head, weighting and set of outputs for all methods, unless a paper demands otherwise."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from perdure.config import parse
from perdure.contract import Method, Needs, Preferences
from perdure.core.errors import UserError
from perdure.runs.compare.common_settings import with_common_settings
from perdure.runs.compare.compare import run_plan
from perdure.runs.compare.plan import PlannedRun, check_plan, plan
from perdure.runs.compare.variants import read_methods
from perdure.runs.directory import RunDirectory
from perdure.training.settings import with_method_defaults

SPLIT: dict[str, Any] = {
    "data": {"limit": 60},
    "stream": {"kind": "split", "tasks": 2, "classes_per_task": 2},
    "clients": {"count": 2},
    "model": {"hidden": [4]},
    "train": {"rounds": 1, "max_steps": 1},
    "engine": {"kind": "serial"},
}


@dataclass(frozen=True)
class Plain(Method):
    """States no preference."""


@dataclass(frozen=True)
class Prefers(Method):
    """Prefers a growing head and equal weights."""

    @property
    def needs(self) -> Needs:
        return Needs(prefers=Preferences({"split": "growing"}, weighting="uniform"))


@dataclass(frozen=True)
class AlsoPrefers(Prefers):
    """Prefers the same."""


@dataclass(frozen=True)
class Demands(Method):
    """Cannot do without a growing head."""

    @property
    def needs(self) -> Needs:
        return Needs(prefers=Preferences({"split": "growing"}, demanded={"head": "it must"}))


@dataclass(frozen=True)
class DemandsOutputs(Method):
    """Trains the outputs of the task alone."""

    @property
    def needs(self) -> Needs:
        must = {"active_outputs": "it must"}
        return Needs(prefers=Preferences(active_outputs="task", demanded=must))


def run(kind: Any, seed: int = 0, **sections: Any) -> PlannedRun:
    values = {**SPLIT, **sections, "seed": seed, "method": {"kind": kind}}
    return PlannedRun(kind if isinstance(kind, str) else kind.__name__, parse(values))


def found(runs: list[PlannedRun], out: Path) -> dict[str, tuple[Any, Any, Any]]:
    return {
        run.label: (run.config.model.head, run.config.train.outputs, run.config.train.weighting)
        for run in with_common_settings(runs, out)
    }


def test_what_every_method_would_choose_is_taken(tmp_path: Path) -> None:
    values = found([run(Prefers), run(AlsoPrefers)], tmp_path)
    assert set(values.values()) == {("growing", "task", "uniform")}


def test_references_take_what_the_methods_have(tmp_path: Path) -> None:
    joint = PlannedRun(
        "joint", run("fedavg", stream={**SPLIT["stream"], "cumulative": True}).config
    )
    values = found([run(Prefers), run(AlsoPrefers), run("single"), joint], tmp_path)
    assert set(values.values()) == {("growing", "task", "uniform")}


def test_where_methods_would_differ_all_have_the_default(tmp_path: Path) -> None:
    values = found([run(Plain), run(Prefers)], tmp_path)
    assert set(values.values()) == {("shared", "all", "samples")}


def test_a_method_whose_paper_demands_it_differs(tmp_path: Path) -> None:
    values = found([run(Plain), run(Prefers), run(Demands), run(DemandsOutputs)], tmp_path)
    assert values["Plain"] == values["Prefers"] == ("shared", "all", "samples")
    assert values["Demands"] == ("growing", "task", "samples")
    assert values["DemandsOutputs"] == ("shared", "task", "samples")


def test_what_the_config_states_holds_for_all(tmp_path: Path) -> None:
    model, train = {"hidden": [4], "head": "shared"}, {**SPLIT["train"], "weighting": "uniform"}
    runs = [run(kind, model=model, train=train) for kind in (Plain, Prefers, Demands)]
    assert set(found(runs, tmp_path).values()) == {("shared", "all", "uniform")}


def test_a_growing_head_is_not_chosen_where_the_stream_has_none(tmp_path: Path) -> None:
    stream = {"kind": "permuted", "tasks": 2}
    values = found([run(kind, stream=stream) for kind in (Plain, Prefers, Demands)], tmp_path)
    assert {head for head, _, _ in values.values()} == {"shared"}


def test_runs_that_exist_and_further_seeds_keep_what_was_chosen(tmp_path: Path) -> None:
    (alone,) = with_common_settings([run(Prefers)], tmp_path)
    complete = with_method_defaults(alone.config)
    RunDirectory.create(alone.path(tmp_path), complete, resume=False).close()
    runs = [run(kind, seed) for seed in (0, 1) for kind in (Plain, Prefers)]
    assert set(found(runs, tmp_path).values()) == {("growing", "task", "uniform")}


@pytest.mark.slow
def test_the_runs_and_the_table_say_what_was_used(tmp_path: Path) -> None:
    planned = plan(SPLIT, read_methods("fedavg,fot,fedprotip"), [0])
    outcome = run_plan(planned, tmp_path, jobs=1)
    saved = RunDirectory.open(tmp_path / "fedavg" / "seed-0").config()
    assert (saved.model.head, saved.train.outputs, saved.train.weighting) == (
        "shared", "all", "samples",
    )  # fmt: skip
    assert outcome.comparison is not None
    first, second = outcome.comparison.notes
    assert "head shared, outputs in the loss all, client weights samples" in first
    assert second.startswith("fedprotip: head growing (")
    for name in ("table.md", "table-task_agnostic.tex"):
        assert second in (tmp_path / name).read_text(encoding="utf-8")


def test_an_error_about_one_method_names_it(tmp_path: Path) -> None:
    planned = plan(SPLIT, read_methods("fedavg,fot:threshold=2"), [0])
    with pytest.raises(UserError, match=r"^fot-threshold=2: method\.threshold: must be"):
        with_common_settings(planned, tmp_path)
    domain_only = [run("fedavg"), run("fed-l2p")]
    with pytest.raises(UserError, match=r"^fed-l2p: model\.kind: must be"):
        check_plan(domain_only, tmp_path)


def test_an_error_about_all_methods_names_none(tmp_path: Path) -> None:
    stream = {"kind": "split", "tasks": 9, "classes_per_task": 2}
    with pytest.raises(UserError, match=r"^stream\."):
        check_plan([run("fedavg", stream=stream), run("fedprox", stream=stream)], tmp_path)
