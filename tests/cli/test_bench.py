"""perdure bench: the list, the file of figures, and errors; speed is not measured here."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

import pytest
from shells import Shell, one_sentence

from perdure.cli import bench


def test_every_benchmark_has_a_main_and_says_how_to_run_it() -> None:
    assert {"engine", "methods", "pool"} <= set(bench.benchmark_names())
    for name in bench.benchmark_names():
        module = import_module(f"perdure.benchmarks.{name}")
        assert callable(module.main)
        assert f"perdure bench {name} --out" in (module.__doc__ or "")


def test_without_a_name_the_benchmarks_are_listed(shell: Shell) -> None:
    plain, document = shell("bench").out, json.loads(shell("bench", "--json").out)
    assert [row["name"] for row in document] == bench.benchmark_names()
    for row in document:
        assert f"  {row['name']} " in plain
        assert row["measures"] in plain


def test_figures_go_to_the_screen_and_to_the_file(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perdure.benchmarks.engine.main", lambda: {"ratio": 2.0})
    said = shell("bench", "engine", "--out", "figures.json")
    assert said.code == 0
    assert json.loads(said.out) == {"ratio": 2.0}
    assert json.loads(Path("figures.json").read_text()) == {"ratio": 2.0}


def test_an_unknown_benchmark_is_refused(shell: Shell) -> None:
    said = shell("bench", "enigne", "--out", "x.json")
    one_sentence(
        said, "bench: must be one of adapter, aggregation, engine, ", "prompts", "got 'enigne'"
    )
    assert not shell.files()


def test_a_folder_that_is_not_there_is_named(shell: Shell) -> None:
    one_sentence(shell("bench", "engine", "--out", "nowhere/x.json"), "nowhere", "does not exist")
