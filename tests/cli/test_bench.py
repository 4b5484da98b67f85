"""perdure bench: names, files and what a bad one gets; figures are measured elsewhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from perdure.cli import bench
from perdure.cli.main import main


def test_every_benchmark_has_a_main_and_says_how_to_run_it() -> None:
    assert {"engine", "methods", "pool"} <= set(bench.names())
    for name in bench.names():
        path = bench.folder() / f"{name}.py"
        assert callable(bench._main(path))
        assert f"perdure bench {name} --out" in path.read_text()


def test_figures_go_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_main", lambda path: lambda: {"ratio": 2.0})
    out = tmp_path / "figures.json"
    assert main(["bench", "engine", "--out", str(out)]) == 0
    assert json.loads(out.read_text()) == {"ratio": 2.0}


def test_an_unknown_benchmark_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "enigne", "--out", str(tmp_path / "x.json")]) == 2
    said = capsys.readouterr().err
    assert "must be engine, , got 'enigne'" in said
    assert "prompts" in said
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "engine", "--out", "nowhere/x.json"]) == 2
    assert "nowhere" in capsys.readouterr().err
