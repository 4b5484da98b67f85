"""python -m benchmarks: the list, the file of figures, and errors; no speed is measured here."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

import pytest

from benchmarks.__main__ import benchmark_names, main
from tools.results import code_hash


def test_every_benchmark_has_a_main_and_says_how_to_run_it() -> None:
    assert {"engine", "methods", "pool"} <= set(benchmark_names())
    for name in benchmark_names():
        module = import_module(f"benchmarks.{name}")
        assert callable(module.main)
        assert f"python -m benchmarks {name} --out" in (module.__doc__ or "")


def test_without_a_name_the_benchmarks_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    plain = capsys.readouterr().out
    assert main(["--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in document] == benchmark_names()
    for row in document:
        assert f"  {row['name']} " in plain
        assert row["measures"] in plain


def test_figures_go_to_the_screen_and_to_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks.engine.main", lambda: {"ratio": 2.0})
    assert main(["engine", "--out", str(tmp_path / "figures.json")]) == 0
    expected = {"code": code_hash(), "ratio": 2.0}
    assert json.loads(capsys.readouterr().out) == expected
    assert json.loads((tmp_path / "figures.json").read_text()) == expected


def test_an_unknown_benchmark_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["enigne", "--out", str(tmp_path / "x.json")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("perdure: error: NAME: must be one of adapter, aggregation, engine, ")
    assert "prompts" in line
    assert line.endswith("got 'enigne'")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["engine", "--out", "nowhere/x.json"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "nowhere" in line
    assert "does not exist" in line
