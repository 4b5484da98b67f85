"""Settings are selected on validation rows; the table shows test rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from perdure.config import parse
from perdure.core.errors import UserError
from perdure.report import page
from perdure.report.records import RunRecord, select_settings
from perdure.runs.compare.compare import compare, run_plan
from perdure.runs.compare.plan import plan
from perdure.runs.compare.variants import Sweep, read_methods
from perdure.runs.records import read_runs

pytestmark = pytest.mark.slow

SMALL: dict[str, Any] = {
    "data": {"limit": 200, "validation": 0.2},
    "stream": {"kind": "split", "tasks": 2, "classes_per_task": 2},
    "clients": {"count": 2},
    "model": {"hidden": [8]},
    "train": {"rounds": 2, "max_steps": 2},
    "engine": {"kind": "serial"},
    "runs": {"report": False},
}
LR = Sweep("train.lr", (1e-6, 0.1))


def record(seed: int, validation: float | None, test: float) -> RunRecord:
    scores = {"metrics": {"task_agnostic": {"ACC": validation}}} if validation is not None else None
    result = {"validation": scores, "metrics": {"task_agnostic": {"ACC": test}}}
    return RunRecord(Path("x"), parse({"seed": seed}), result)


def test_the_best_mean_over_seeds_on_validation_rows_is_selected() -> None:
    groups = {
        "fot-a": [record(0, 0.9, 0.1), record(1, 0.3, 0.1)],
        "fot-b": [record(0, 0.7, 0.0), record(1, 0.6, 0.0)],
        "fot-c": [record(0, 0.5, 1.0), record(1, 0.5, 1.0)],
        "fedavg": [record(0, 0.2, 0.3)],
        "older": [record(0, None, 0.9)],
    }
    methods = {label: label.split("-")[0] for label in groups}
    found = select_settings(methods, groups)
    assert found.selected == {"fot": "fot-b", "fedavg": "fedavg"}
    assert found.rejected == {"fot-a", "fot-c"}
    assert found.scores["fot"]["fot-a"] == {"0": 0.9, "1": 0.3}


def test_a_comparison_shows_the_test_metrics_of_what_was_selected(tmp_path: Path) -> None:
    outcome = compare(
        SMALL, "fedavg", [100], out=tmp_path, sweeps=[LR], references="none", select="validation",
        jobs=1,
    )  # fmt: skip
    scores = {
        lr: json.loads((tmp_path / f"fedavg-train.lr={lr}/seed-100/result.json").read_text())
        for lr in (1e-6, 0.1)
    }
    validation = {
        lr: r["validation"]["metrics"]["task_agnostic"]["ACC"] for lr, r in scores.items()
    }
    best = max(validation, key=lambda lr: validation[lr])
    comparison = outcome.comparison
    assert comparison is not None
    assert comparison.labels == [f"fedavg-train.lr={best}"]
    cell = comparison.cell(comparison.labels[0], "metrics.task_agnostic.ACC")
    assert cell is not None
    assert cell.summary.mean == scores[best]["metrics"]["task_agnostic"]["ACC"]
    assert "selected on validation rows" in comparison.notes[0]
    saved = json.loads((tmp_path / "comparison.json").read_text())["selection"]
    assert saved["selected"] == {"fedavg": comparison.labels[0]}
    assert {len(by_seed) for by_seed in saved["scores"]["fedavg"].values()} == {1}
    runs = read_runs([tmp_path])
    assert list(runs.groups) == comparison.labels
    text = page(runs)
    assert "selected on validation rows" in text
    assert all(f"fedavg-train.lr={lr}" in text for lr in (1e-6, 0.1))
    assert "selected on validation rows" in (tmp_path / "table.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("select", "validation", "sentence"),
    [
        ("test", 0.2, r"select: must be validation, since test rows are never selected on"),
        ("validation", 0.0, r"data\.validation: must be above 0 with select='validation'"),
    ],
)
def test_nothing_else_is_selected_on(
    select: str, validation: float, sentence: str, tmp_path: Path
) -> None:
    values = {**SMALL, "data": {"limit": 200, "validation": validation}}
    planned = plan(values, read_methods("fedavg"), [100], [LR])
    with pytest.raises(UserError, match=sentence):
        run_plan(planned, tmp_path / "out", select=select)
    assert not (tmp_path / "out").exists()
