"""perdure demo, made small."""

from __future__ import annotations

from pathlib import Path

import pytest
from shells import TINY, Shell

from perdure.cli import demo
from perdure.metrics import DEFINITIONS


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "SETTING", TINY)


def test_matrices_metrics_and_their_definitions_are_shown(shell: Shell) -> None:
    said = shell("demo")
    assert said.code == 0
    for method in demo.METHODS:
        assert f"{method['kind']}: task_agnostic accuracy on each task" in said.out
    for name, meaning in DEFINITIONS.items():
        assert f"{name} " in said.out
        assert meaning in said.out
    assert shell.files() == set()


def test_numbers_are_those_of_the_runs(shell: Shell) -> None:
    said = shell("demo", "--out", "kept")
    result = demo.one(demo.configs()[0], Path("kept/fedavg"), True, Path("kept"))
    found = result.metrics["task_agnostic"]
    row = next(
        line for line in said.out.splitlines() if line.split()[:1] == ["fedavg"] and "B" in line
    )
    assert row.split()[1:9] == [f"{found[name]:.3f}" for name in DEFINITIONS]


def test_the_same_command_goes_on(shell: Shell) -> None:
    first = shell("demo", "--out", "kept", "--quiet")
    again = shell("demo", "--out", "kept", "--quiet")
    assert again.code == 0
    assert again.out == first.out


def test_the_setting_itself_is_good(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert [config.method["kind"] for config in demo.configs()][:2] == ["fedavg", "fedprox"]
