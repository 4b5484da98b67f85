"""--json: one document on stdout and nothing else there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from shells import TINY, Said, Shell

from perdure.cli import demo as demo_parts
from perdure.cli.demo import DemoPart, DemoRun
from perdure.cli.main import COMMANDS, find_command
from perdure.recipes import recipe_names

TABLES = {
    "check", "compare", "demo", "env", "methods", "predict", "recipes", "report",
    "run", "watch",
}  # fmt: skip
"""Commands that print a table or several values."""


def _document(said: Said) -> Any:
    assert said.code == 0, said.err
    return json.loads(said.out)


@pytest.fixture
def run(shell: Shell) -> Path:
    assert shell("run", shell.config(), "--out", "runs/one", "--quiet").code == 0
    return Path("runs/one")


def _result(path: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((path / "result.json").read_text())
    return values


def test_every_command_with_a_table_has_the_option() -> None:
    commands = {name: find_command(name) for name in COMMANDS}
    assert {name for name in commands if _has_json(commands[name])} >= TABLES


def _has_json(command: Any) -> bool:
    return any("--json" in option.opts for option in command.params)


def test_run(shell: Shell) -> None:
    said = shell("run", shell.config(), "--out", "out", "--json")
    assert _document(said) == {"path": "out", **_result(Path("out"))}
    assert said.err == ""


def test_check(shell: Shell) -> None:
    document = _document(shell("check", shell.config(), "--json"))
    assert document["dry_run"] is None
    assert (document["method"], document["tasks"], document["rounds"]) == ("fedavg", 2, 4)
    tried = _document(shell("check", shell.config(), "--dry-run", "--json"))["dry_run"]
    assert tried["agrees"] is True
    assert tried["difference"] <= 1e-4


@pytest.mark.slow
def test_compare(shell: Shell) -> None:
    words = ["--methods", "fedavg", "--seeds", "0", "--out", "c", "--json", "--references", "none"]
    document = _document(shell("compare", shell.config(), *words))
    assert document == json.loads(Path("c/comparison.json").read_text())
    accuracy = document["table"]["cells"]["fedavg"]["metrics.task_agnostic.ACC"]["mean"]
    assert accuracy == _result(Path("c/fedavg/seed-0"))["metrics"]["task_agnostic"]["ACC"]


def test_report(shell: Shell, run: Path) -> None:
    document = _document(shell("report", run, "--json"))
    assert document["runs"] == {"fedavg": [str(run)]}
    cell = document["table"]["cells"]["fedavg"]["metrics.task_agnostic.ACC"]
    assert cell["mean"] == _result(run)["metrics"]["task_agnostic"]["ACC"]
    assert (document["html"], document["figures"]) == (None, None)
    assert _document(shell("report", run, "--html", "x.html", "--json"))["html"] == "x.html"


def test_report_without_files_prints_the_table(shell: Shell, run: Path) -> None:
    said = shell("report", run)
    row = next(line for line in said.out.splitlines() if line.split()[:2] == ["fedavg", "1"])
    assert f"{_result(run)['metrics']['task_agnostic']['ACC']:.3f}" in row


def test_watch_once(shell: Shell, run: Path) -> None:
    document = _document(shell("watch", "runs", "--once", "--json"))
    assert list(document) == ["one"]
    assert (document["one"]["rounds"], document["one"]["finished"]) == (4, True)


def test_predict(shell: Shell, run: Path) -> None:
    np.save("x.npy", np.zeros((2, 8, 8), dtype=np.uint8))
    document = _document(shell("predict", run, "x.npy", "--json"))
    plain = shell("predict", run, "x.npy").out.splitlines()
    assert [f"{row['input']}: {row['class']}" for row in document] == plain
    assert {type(row["label"]) for row in document} == {int}


def test_recipes(shell: Shell) -> None:
    document = _document(shell("recipes", "--json"))
    assert sorted(row["name"] for row in document) == recipe_names()
    assert {row["size"] for row in document} == {"small", "paper"}
    one = _document(shell("recipes", "split-digits", "--json"))
    assert one["command"] == "perdure run split-digits"
    assert one["config"]["stream"]["kind"] == "split"


@pytest.mark.slow
def test_demo(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    fedavg = {"fedavg": DemoRun({"kind": "fedavg"})}
    parts = tuple(DemoPart(name, TINY, fedavg, ()) for name in ("permuted", "split"))
    monkeypatch.setattr(demo_parts, "PARTS", parts)
    document = _document(shell("demo", "--json"))
    assert set(document) == {"permuted", "split"}
    assert set(document["split"]["table"]["cells"]) == {"fedavg"}


def test_methods_are_described_with_what_the_server_sees(shell: Shell) -> None:
    methods = {each["kind"]: each for each in _document(shell("methods", "--json"))}
    assert methods["stamp"]["per_client_fields"] == ["update"]
    (one,) = _document(shell("methods", "fedprox", "--json"))
    assert one == methods["fedprox"]
    assert one["hyperparameters"][0]["name"] == "mu"
