"""Every kind of bad input gets one sentence, exit code 2, and nothing is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from shells import Shell, one_sentence

from perdure.cli.main import main

Make = Callable[[Path], dict[str, Any]]


def _npz(folder: Path, **changes: Any) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    arrays: dict[str, Any] = {
        "x_train": rng.integers(0, 256, (60, 8, 8), dtype=np.uint8),
        "y_train": np.arange(60) % 10,
        "x_test": rng.integers(0, 256, (20, 8, 8), dtype=np.uint8),
        "y_test": np.arange(20) % 10,
    }
    np.savez(folder / "set.npz", **(arrays | changes))
    return {"data": {"source": "npz", "path": "set.npz"}}


def _cut_npz(folder: Path) -> dict[str, Any]:
    config = _npz(folder)
    data = (folder / "set.npz").read_bytes()
    (folder / "set.npz").write_bytes(data[: len(data) // 2])
    return config


def _images(folder: Path, sizes: list[int]) -> dict[str, Any]:
    for label in "ab":
        (folder / "pictures" / label).mkdir(parents=True)
        for number, size in enumerate(sizes):
            image = Image.fromarray(np.full((size, size), 9 * number, dtype=np.uint8))
            image.save(folder / "pictures" / label / f"{number}.png")
    return {"data": {"source": "folder", "path": "pictures"}}


def _broken_image(folder: Path) -> dict[str, Any]:
    config = _images(folder, [8, 8, 8, 8])
    (folder / "pictures" / "a" / "1.png").write_bytes(b"no picture")
    return config


def _only_split(folder: Path) -> dict[str, Any]:
    (folder / "picky_method.py").write_text(
        "from dataclasses import dataclass\n"
        "from perdure import Method, Needs\n"
        "@dataclass(frozen=True)\n"
        "class Picky(Method):\n"
        "    needs = property(lambda self: Needs(streams=frozenset({'split'})))\n"
    )
    return {"method": {"kind": "picky_method.Picky"}}


def _bad_weights(folder: Path) -> dict[str, Any]:
    (folder / "weights.safetensors").write_bytes(b"no weights")
    return {"model": {"kind": "mlp", "init": "weights.safetensors"}}


CONFIGS: dict[str, tuple[dict[str, Any] | Make, tuple[str, ...]]] = {
    "unknown section": ({"trian": {}}, ("trian", "train")),
    "unknown key": ({"train": {"rounds": 2, "lrr": 0.1}}, ("train.lrr", "0.1", "lr")),
    "unknown partition key": (
        {"clients": {"partition": {"beta": 1}}},
        ("clients.partition.beta: unknown key for kind 'iid'", "got 1"),
    ),
    "text for a number": ({"train": {"lr": "fast"}}, ("train.lr", "'fast'", "a number")),
    "a rate beyond all numbers": (
        {"train": {"lr": 1e300}},
        ("train.lr", "1e+300", "at most 1e+30"),
    ),
    "list for a section": ({"train": [1]}, ("train: must be a mapping", "got [1]")),
    "fraction of rounds": ({"train": {"rounds": 1.5}}, ("train.rounds", "1.5", "integer")),
    "switch for a number": ({"train": {"rounds": True}}, ("train.rounds", "True", "a number")),
    "no tasks": ({"stream": {"tasks": 0}}, ("stream.tasks", "0", "at least 1")),
    "no clients": ({"clients": {"count": 0}}, ("clients.count", "0", "at least 1")),
    "too many a round": (
        {"clients": {"count": 3, "per_round": 4}},
        ("clients.per_round", "4", "1 to 3"),
    ),
    "alpha of zero": (
        {"clients": {"partition": {"kind": "dirichlet", "alpha": 0}}},
        ("clients.partition.alpha", "0", "greater than 0"),
    ),
    "negative alpha": (
        {"clients": {"partition": {"kind": "dirichlet", "alpha": -0.5}}},
        ("clients.partition.alpha", "-0.5", "greater than 0"),
    ),
    "too many classes per task": (
        {"stream": {"kind": "split", "tasks": 2, "classes_per_task": 11}},
        ("stream.classes_per_task", "11"),
    ),
    "too many classes in all": (
        {"stream": {"kind": "split", "tasks": 4, "classes_per_task": 3}},
        ("stream.classes_per_task", "3"),
    ),
    "more clients than images": ({"clients": {"count": 5000}}, ("clients.count", "5000")),
    "no such stream": (
        {"stream": {"kind": "splitt"}},
        ("stream.kind: must be", " split, ", "got 'splitt'"),
    ),
    "no such method": ({"method": {"kind": "fedavgg"}}, ("method.kind", "'fedavgg'", "fedavg")),
    "no such class": (
        {"method": {"kind": "no_such_module.Method"}},
        ("method.kind", "no_such_module"),
    ),
    "method without a kind": ({"method": {"mu": 1}}, ("method.kind", "None")),
    "no such hyperparameter": (
        {"method": {"kind": "fedprox", "my": 1}},
        ("method.my", "1"),
    ),
    "impossible hyperparameter": (
        {"method": {"kind": "fedprox", "mu": -1}},
        ("method.mu", "-1", "at least 0"),
    ),
    "method and stream": (_only_split, ("stream.kind", "'permuted'", "split")),
    "no path": ({"data": {"source": "npz"}}, ("data.path: must be given", "'npz'")),
    "no such file": (
        {"data": {"source": "npz", "path": "gone.npz"}},
        ("data.path", "gone.npz", "exists"),
    ),
    "no such folder": (
        {"data": {"source": "idx", "path": "gone"}},
        ("data.path", "gone"),
    ),
    "corrupt file": (_cut_npz, ("data.path", "set.npz")),
    "labels of another shape": (
        lambda f: _npz(f, y_test=np.zeros((0, 3))),
        ("data.path", "set.npz", "y_test"),
    ),
    "negative label": (
        lambda f: _npz(f, y_train=np.arange(60) % 10 - 1),
        ("data.path", "set.npz", "-1"),
    ),
    "label out of range": (
        lambda f: _npz(f, y_test=np.arange(20)),
        ("data.path", "set.npz", "19", "out of range"),
    ),
    "labels that are no integers": (
        lambda f: _npz(f, y_train=np.linspace(0, 9, 60)),
        ("data.path", "set.npz", "float64"),
    ),
    "mixed sizes": (
        lambda f: _images(f, [8, 8, 9, 8]),
        ("data.size", "8x8", "9x9"),
    ),
    "broken image": (_broken_image, ("data.path", "1.png")),
    "missing weights": (
        {"model": {"kind": "mlp", "init": "gone.safetensors"}},
        ("model.init", "gone.safetensors"),
    ),
    "corrupt weights": (_bad_weights, ("model.init", "weights.safetensors")),
    "growing head on a pool": (
        {"stream": {"kind": "pool", "tasks": 2}, "model": {"kind": "mlp", "head": "growing"}},
        ("model.head", "'growing'", "shared"),
    ),
}


@pytest.mark.parametrize("command", ["run", "check"])
@pytest.mark.parametrize("name", list(CONFIGS))
def test_a_bad_config(shell: Shell, name: str, command: str) -> None:
    made, parts = CONFIGS[name]
    file = shell.config(made(shell.folder) if callable(made) else made)
    before = shell.files()
    one_sentence(shell(command, file), *parts)
    assert _real(shell.files()) == before


def _real(files: set[str]) -> set[str]:
    """Without what Python itself leaves when it imports a method."""
    return {name for name in files if "__pycache__" not in name}


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["run", "gone.yaml"], ("gone.yaml", "no such config file")),
        (["run", "split-digit"], ("split-digit", "no such config file", "mean split-digits?")),
        (["recipes", "split-digit"], ("'split-digit'", "mean split-digits?")),
        (["watch", ".", "--json"], ("--json", "--once")),
        (["run", "list.yaml"], ("list.yaml", "list", "mapping")),
        (["run", "broken.yaml"], ("broken.yaml", "not a YAML file")),
        (["run", "."], ("a folder, not a config file",)),
        (["run"], ("CONFIG",)),
        (["run", "tiny.yaml", "--set", "train.lr"], ("--set: must be key=value", "got 'train.lr'")),
        (["run", "tiny.yaml", "--set", "train.lr=no"], ("train.lr", "a number")),
        (["run", "tiny.yaml", "--set", "train.lr=[1"], ("--set train.lr", "[1", "YAML")),
        (["run", "tiny.yaml", "--set", "seed.x=1"], ("seed", "integer")),
        (["run", "tiny.yaml", "--engine", "steam"], ("engine.kind", "'steam'", "vector")),
        (["run", "tiny.yaml", "--engine", ""], ("engine.kind", "must be auto", "got None")),
        (["run", "tiny.yaml", "--fast"], ("--fast",)),
        (["run", "tiny.yaml", "--resume"], ("--resume", "runs", "not a run directory")),
        (["run", "tiny.yaml", "--out", "list.yaml"], ("--out list.yaml", "a file")),
        (["run", "tiny.yaml", "--out", "list.yaml/below"], ("--out list.yaml/below",)),
        (["rnu", "tiny.yaml"], ("'rnu'. Did you mean 'run'? (see perdure --help)",)),
        (["federation", "serve"], ("'serve'", "(see perdure federation --help)")),
        (["run", "tiny.yaml", "--jsn"], ("'--jsn'", "--json", "(see perdure run --help)")),
        (["demo", "--out", "list.yaml"], ("list.yaml",)),
        (
            ["run", "tiny.yaml", "--set", "data.path=x.npz"],
            ("data.path: unknown key for source 'digits'", "got 'x.npz'"),
        ),
        (["compare", "tiny.yaml", "--methods", "fot:kind=er", "--out", "x"], ("fot:kind=er",)),
        (["compare", "tiny.yaml", "--methods", "fot", "--out", "list.yaml/x"], ("list.yaml",)),
        (["run", "broken.yaml"], ("broken.yaml", "line 2: ")),
        (["predict", "gone", "tiny.yaml"], ("gone", "no trained model")),
        (["predict", "gone", "tiny.yaml", "--out", "x.txt"], ("--out", "x.txt", ".csv")),
    ],
)
def test_a_bad_command(shell: Shell, words: list[str], parts: tuple[str, ...]) -> None:
    shell.config()
    (shell.folder / "list.yaml").write_text("- 1\n")
    (shell.folder / "broken.yaml").write_text("a: [1\nb: }\n")
    before = shell.files()
    one_sentence(shell(*words), *parts)
    assert shell.files() == before


def test_a_run_directory_is_not_overwritten_nor_resumed_with_another_config(shell: Shell) -> None:
    file = shell.config()
    assert shell("run", file, "--out", "out").code == 0
    before = {name: _content(shell.folder / name) for name in shell.files()}
    one_sentence(shell("run", file, "--out", "out"), "--out out", "--resume")
    other = shell("run", file, "--out", "out", "--resume", "--set", "train.lr=0.2")
    one_sentence(other, "train.lr", "0.2", "0.1")
    assert {name: _content(shell.folder / name) for name in shell.files()} == before


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


@pytest.mark.parametrize(
    ("error", "part"),
    [
        (
            RuntimeError(
                "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate "
                "memory: you tried to allocate 14380000000000 bytes. Error code 12 (Cannot ...)\nat"
            ),
            "(you tried to allocate 14380000000000 bytes)",
        ),
        (MemoryError("Unable to allocate 7.3 TiB for an array"), "(Unable to allocate 7.3 TiB for"),
    ],
    ids=["torch", "numpy"],
)
def test_too_little_memory_is_one_sentence(
    error: Exception, part: str, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr("perdure.cli.main.app", fail)
    said = shell("run", "x.yaml")
    assert said.code == 1
    assert said.err.startswith("perdure: error: not enough memory on this machine")
    assert part in said.err
    assert said.err.count("\n") == 1


def test_a_method_that_breaks_the_contract_is_one_sentence_without_a_way_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("scalar_loss.py").write_text(
        "from dataclasses import dataclass\n"
        "from perdure import Method, Train\n"
        "@dataclass(frozen=True)\n"
        "class Scalar(Method):\n"
        "    def exchanges(self, context):\n"
        "        return [Train(loss=self.loss)]\n"
        "    def loss(self, step):\n"
        "        return step.cross_entropy(step.logits()).mean()\n"
    )
    Path("my.yaml").write_text("data: {limit: 40}\nmethod: {kind: scalar_loss.Scalar}\n")
    assert main(["run", "my.yaml", "--quiet", "--out", "out"]) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert said.startswith("perdure: error: loss: must be one value per row ")
    assert said.endswith(", got a single value")
    assert "--resume" not in said
