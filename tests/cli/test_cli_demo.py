"""perdure demo, made small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from shells import TINY, Shell

from perdure.cli import demo
from perdure.federation.experiment import prepare
from perdure.metrics import DEFINITIONS

KINDS = [method["kind"] for method in demo.METHODS]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "SETTING", TINY)
    monkeypatch.setattr(demo, "METHODS", ({"kind": "fedavg"}, {"kind": "fot"}))


@pytest.mark.usefixtures("small")
def test_the_demo_compares_explains_and_reports_and_goes_on(shell: Shell) -> None:
    said = shell("demo")
    assert said.code == 0
    for kind in ("fedavg", "fot"):
        found = json.loads((demo.USUAL_OUT / kind / "seed-0" / "result.json").read_text())
        row = next(line for line in said.out.splitlines() if line.split()[:2] == [kind, "1"])
        assert f"{found['metrics'][demo.MODE]['ACC']:.3f}" in row
        assert f"{kind}: task_agnostic accuracy on each task" in said.out
    for name, meaning in DEFINITIONS.items():
        assert f"{name} " in said.out
        assert meaning in said.out
    page = (demo.USUAL_OUT / "report.html").read_text(encoding="utf-8")
    assert "2 methods on permuted digits" in page
    again = shell("demo", "--out", demo.USUAL_OUT, "--quiet")
    assert again.code == 0
    assert row in again.out  # nothing was trained anew


@pytest.mark.usefixtures("small")
def test_a_file_in_the_way(shell: Shell) -> None:
    Path("taken").write_text("")
    said = shell("demo", "--out", "taken")
    assert said.code == 2
    assert "--out taken: is a file" in said.err


def test_the_setting_itself_is_good() -> None:
    planned = demo.plan()
    assert [run.label for run in planned] == KINDS
    assert {"fedavg", "fot", "fedprotip", "stamp", "special"} <= set(KINDS)
    for run in planned:
        assert prepare(run.config).tasks == 5
