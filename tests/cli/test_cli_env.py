"""perdure env: versions, threads and extras."""

from __future__ import annotations

import json
import platform
from importlib import metadata

import numpy as np
import pytest
import torch
from shells import Shell

import perdure
from perdure.cli import env


def test_the_facts_are_those_of_this_process(shell: Shell) -> None:
    document = json.loads(shell("env", "--json").out)
    assert document["perdure"] == perdure.__version__
    assert document["python"] == platform.python_version()
    assert document["packages"]["torch"] == metadata.version("torch")
    assert document["packages"]["numpy"] == np.__version__
    assert document["threads"]["torch"] == torch.get_num_threads()
    assert document["cpu"]["capability"] == torch.backends.cpu.get_cpu_capability()
    assert document["devices"][0] == "cpu"


def test_extras_are_listed_installed_or_not(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        'flwr>=1; extra == "flower"',
        "nowhere; extra == 'ray'",
        'x; extra == "dev"',
        "torch>=2",
    ]
    monkeypatch.setattr(env.metadata, "requires", lambda name: lines)
    document = json.loads(shell("env", "--json").out)
    assert list(document["packages"]) == ["torch"]
    assert document["extras"]["ray"] == {"nowhere": None}
    assert set(document["extras"]) == {"flower", "ray"}
    plain = shell("env").out
    assert "nowhere (not installed)" in plain
    assert f"torch {torch.__version__.partition('+')[0]}" in plain


def test_a_source_tree_without_metadata_names_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(env.metadata, "requires", missing)
    assert env.requirements() == (["torch", "numpy"], {})
