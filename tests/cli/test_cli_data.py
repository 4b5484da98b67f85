"""perdure data: the list of data sets, and files made from official ones."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from shells import Shell

import official_files as files
from perdure.data.named.sets import DATA_SETS
from perdure.data.sources import huggingface as hub_connection


@pytest.fixture(autouse=True)
def _folders(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("sets").mkdir()
    monkeypatch.setenv("PERDURE_DATA", "sets")
    monkeypatch.setenv("PERDURE_CACHE", "cache")
    monkeypatch.setattr(hub_connection, "is_reachable", lambda url: False)


def test_the_list_says_what_is_found(shell: Shell) -> None:
    x, y = files.gray(8), np.arange(8) % 2
    np.savez("sets/mnist.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    said = shell("data", "list")
    assert said.code == 0
    for name in DATA_SETS:
        assert f"  {name} " in said.out
    assert "sets/mnist.npz" in said.out
    rows = {row["name"]: row for row in json.loads(shell("data", "list", "--json").out)}
    assert rows["mnist"]["found"] == "sets/mnist.npz"
    assert rows["usps"]["found"] is None
    assert rows["cifar100"]["license"] == "research use"
    assert "huggingface uoft-cs/cifar100" in rows["cifar100"]["origin"]


def test_a_made_file_is_trained_on(shell: Shell) -> None:
    contents, _ = files.cifar100_binary()
    Path("official").mkdir()
    files.pack(Path("official/cifar-100-binary.tar.gz"), contents, "cifar-100-binary")
    said = shell("data", "make", "cifar100", "--from", "official")
    assert said.code == 0
    assert "cifar100: written to cache/cifar100-" in said.out
    config = shell.config({"data": {"source": "cifar100"}, "stream": {"tasks": 1}})
    assert shell("check", str(config)).code == 0
    again = shell("data", "make", "cifar100", "--from", "official", "--out", "sets/cifar100.npz")
    assert again.code == 0
    with np.load("sets/cifar100.npz") as arrays:
        assert arrays["x_train"].shape == (files.TRAIN, 32, 32, 3)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["data", "make", "mnist", "--from", "gone"], "--from: must be a folder that exists"),
        (["data", "make", "moon", "--from", "sets"], "NAME: must be one of mnist"),
        (["data", "make", "mnist", "--from", "sets"], "they are not there"),
        (["data", "make", "mnist"], "--from"),
        (["run", "fot-cifar100"], "data.source: cifar100 could not be loaded"),
    ],
)
def test_mistakes_are_one_sentence(shell: Shell, words: list[str], expected: str) -> None:
    said = shell(*words)
    assert said.code == 2
    assert expected in said.err
    assert len([line for line in said.err.splitlines() if "error" in line]) == 1
    assert not Path("cache").exists()
    assert not Path("runs").exists()
