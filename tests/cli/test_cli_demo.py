"""perdure demo, made small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from shells import TINY, Shell

from perdure.cli import demo
from perdure.training.experiment import build_experiment
from perdure.training.metrics import DEFINITIONS


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "SETTING", TINY)
    monkeypatch.setattr(demo, "SPLIT", TINY)
    monkeypatch.setattr(demo, "METHODS", ({"kind": "fedavg"}, {"kind": "fot"}))
    monkeypatch.setattr(demo, "PROMPT_METHODS", ({"kind": "special"},))


@pytest.mark.usefixtures("small")
def test_the_demo_compares_explains_and_reports_and_goes_on(shell: Shell) -> None:
    said, folder = shell("demo"), demo.DEFAULT_OUT / "permuted"
    assert said.code == 0
    for kind in ("fedavg", "fot"):
        found = json.loads((folder / kind / "seed-0" / "result.json").read_text())
        row = next(line for line in said.out.splitlines() if line.split()[:2] == [kind, "1"])
        assert f"{found['metrics'][demo.MODE]['ACC']:.3f}" in row
        assert f"{kind}: task_agnostic accuracy on each task" in said.out
    for name, meaning in DEFINITIONS.items():
        assert f"{name} " in said.out
        assert meaning in said.out
    assert "2 methods on permuted digits" in (folder / "report.html").read_text(encoding="utf-8")
    assert (demo.DEFAULT_OUT / "split" / "report.html").is_file()
    again = shell("demo", "--out", demo.DEFAULT_OUT, "--quiet")
    assert again.code == 0
    assert row in again.out  # nothing was trained again


@pytest.mark.usefixtures("small")
def test_a_file_in_the_way(shell: Shell) -> None:
    Path("taken").write_text("")
    said = shell("demo", "--out", "taken")
    assert said.code == 2
    assert "--out taken: must be a directory, got a file" in said.err


def test_the_settings_themselves_are_good() -> None:
    planned = [*demo.permuted_runs(), *demo.split_runs()]
    kinds = {run.label for run in planned}
    assert {"fedavg", "fot", "fedprotip", "stamp", "special", "pip"} <= kinds
    for run in planned:
        assert build_experiment(run.config).task_count == 5
