"""perdure demo, made small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from shells import TINY, Shell

from perdure.cli import demo
from perdure.cli import demo as demo_parts
from perdure.cli.demo import DemoPart, DemoRun
from perdure.evaluation.forgetting import DEFINITIONS
from perdure.runs.compare.variants import MethodChoice
from perdure.training.experiment import build_experiment

pytestmark = pytest.mark.slow


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    methods = {kind: DemoRun({"kind": kind}) for kind in ("fedavg", "fot")}
    slower = {"special-slow": DemoRun({"kind": "special"}, {"train.lr": 0.01})}
    parts = (
        DemoPart("permuted", TINY, methods, (MethodChoice("joint"),)),
        DemoPart("split", TINY, slower, ()),
    )
    monkeypatch.setattr(demo_parts, "PARTS", parts)


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
    assert "3 methods on permuted digits" in (folder / "report.html").read_text(encoding="utf-8")
    assert "references" in said.out.partition("fot: ")[2]
    assert (folder / "joint" / "seed-0" / "result.json").is_file()
    assert (demo.DEFAULT_OUT / "split" / "report.html").is_file()
    config = (demo.DEFAULT_OUT / "split" / "special-slow" / "seed-0" / "config.yaml").read_text()
    assert "lr: 0.01" in config
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
    labels = [run.label for part in demo_parts.PARTS for run in part.runs()]
    five = {"fot", "fedprotip", "stamp", "special", "pip"}
    assert five | {"joint", "single", "fedncm-raw", "fedlda-raw"} <= set(labels)
    for part in demo_parts.PARTS:
        first, *_ = part.methods
        assert first == "fedavg"  # which the others are compared with
        for run in part.runs():
            assert build_experiment(run.config).task_count == 5
