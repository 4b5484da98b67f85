"""References: which a comparison adds, what they are, and where its tables put them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from perdure.core.errors import UserError
from perdure.report.table_writers import latex_tables, to_markdown
from perdure.runs.compare.compare import compare
from perdure.runs.compare.plan import PlannedRun, plan, plan_references
from perdure.runs.compare.variants import MethodChoice, read_methods

pytestmark = pytest.mark.slow

TINY: dict[str, Any] = {
    "data": {"limit": 100},
    "stream": {"kind": "permuted", "tasks": 2},
    "clients": {"count": 2},
    "model": {"hidden": [6]},
    "train": {"rounds": 1},
    "engine": {"kind": "serial"},
}
VIT = {"kind": "vit"}
RAW = ["fedncm-raw", "fedlda-raw", "fedridge-raw"]
FEATURES = ["fedncm", "fedlda", "fedridge"]


def references(values: dict[str, Any], chosen: str, methods: str = "fedavg") -> list[PlannedRun]:
    planned = plan(values, read_methods(methods), [0, 3])
    return list(plan_references(values, chosen, planned))


def labels(runs: list[PlannedRun]) -> list[str]:
    return list(dict.fromkeys(run.label for run in runs))


def test_joint_is_fedavg_on_a_cumulative_stream_and_its_config_says_so() -> None:
    (run,) = plan(TINY, [MethodChoice("joint")], [0])
    assert run.label == "joint"
    assert run.config.method == {"kind": "fedavg"}
    assert run.config.stream.cumulative
    assert run.config.stream.tasks == 2
    (named,) = plan(TINY, read_methods("joint:with=[{kind: fedprox}]"), [0])
    assert named.label.startswith("joint-with")
    assert named.config.method == {"kind": "fedavg", "with": [{"kind": "fedprox"}]}


def test_the_cheap_ones_and_all() -> None:
    assert labels(references(TINY, "none")) == []
    assert labels(references(TINY, "closed-form")) == RAW
    trained = [f"{kind}-task-1" for kind in FEATURES]
    assert labels(references(TINY, "all")) == ["joint", "single", *RAW, *trained]
    assert {run.seed for run in references(TINY, "closed-form")} == {0, 3}
    inputs = {run.label: run.config.method for run in references(TINY, "all")}
    assert inputs["fedlda-raw"] == {"kind": "fedlda", "inputs": "raw"}
    assert inputs["fedlda-task-1"] == {"kind": "fedlda", "train_first": True}


def test_a_pretrained_model_is_judged_by_its_features_too() -> None:
    assert labels(references(TINY | {"model": VIT}, "closed-form")) == [*RAW, *FEATURES]


def test_what_is_there_already_is_not_added_twice() -> None:
    methods = "fedavg,joint,fedncm:inputs=raw"
    assert labels(references(TINY, "closed-form", methods)) == RAW[1:]
    assert "joint" not in labels(references(TINY, "all", methods))


def test_impossible_references_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    large = TINY | {"data": {"limit": 40, "size": 70}, "model": {"kind": "mlp", "hidden": [2]}}
    with caplog.at_level(logging.WARNING):
        assert labels(references(large, "closed-form")) == ["fedncm-raw"]
    assert "the reference fedlda-raw is left out: an example has 4900 values" in caplog.text


def test_another_set_is_refused() -> None:
    with pytest.raises(UserError, match="references: must be closed-form, all, none, got 'x'"):
        references(TINY, "x")


def test_tables_set_them_apart(tmp_path: Path) -> None:
    methods = [MethodChoice("fedncm", {"inputs": "raw"}), MethodChoice("fedavg")]
    outcome = compare(TINY, [methods[1], methods[0]], [0], out=tmp_path, references="none")
    table = outcome.comparison
    assert table is not None
    assert table.references == ("fedncm-inputs=raw",)
    assert table.to_dict()["references"] == ["fedncm-inputs=raw"]
    lines = to_markdown(table).splitlines()
    place = next(i for i, line in enumerate(lines) if line.startswith("| references |"))
    assert lines[place - 1].startswith("| fedavg |")
    assert lines[place + 1].startswith("| fedncm-inputs=raw |")
    assert lines[place].count("|") == lines[place - 1].count("|")
    latex = latex_tables(table)["table-task_agnostic.tex"]
    assert latex.rpartition("\\midrule")[2].count("fedncm") == 1
    assert "fedavg" in latex.rpartition("\\midrule")[0]
    first = compare(TINY, methods, [0], out=tmp_path, references="none").comparison
    assert first is not None
    assert first.references == ()  # the method that the others are compared with stays first
    assert "| references |" not in to_markdown(first)
