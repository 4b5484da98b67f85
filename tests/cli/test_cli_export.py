"""perdure export: files for other runtimes, written only if they predict as the model does."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from shells import TINY, Shell, one_sentence
from sklearn.datasets import load_digits

import perdure
from perdure.deploy import portable_model

DIGITS = np.rint(load_digits().images[:50] * (255 / 16)).astype(np.uint8)[:, None]
SPLIT = {"kind": "split", "tasks": 2, "classes_per_task": 3}
CALLABLES = ("state_dict", "torch-export", "onnx")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a routing method: all that a file must contain."""
    path = tmp_path_factory.mktemp("trained") / "routed"
    method = {"kind": "fedprotip", "routing": "batch"}
    perdure.run({**TINY, "stream": SPLIT, "method": method}, out=path)
    return path


def labels_of(path: str, run: Path) -> Any:
    """Labels by the runtime of a file; only a state_dict needs perdure."""
    rows = torch.from_numpy(DIGITS)
    if path.endswith(".onnx"):
        session = pytest.importorskip("onnxruntime").InferenceSession(path)
        return [session.run(None, {"x": part})[0].argmax(1) for part in (DIGITS[:1], DIGITS[1:])]
    if path.endswith(".pt2"):
        extra = {"card.json": ""}
        program = torch.export.load(path, extra_files=extra).module()
        assert json.loads(extra["card.json"])["class_names"] == [str(d) for d in range(10)]
        return [program(part).argmax(1) for part in (rows[:1], rows[1:])]
    module = perdure.load(run).module
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
        module.load_state_dict(torch.load(path, weights_only=True))
        return [module(rows).argmax(1)]


@pytest.mark.parametrize("kind", CALLABLES)
def test_a_file_predicts_as_the_model_on_any_number_of_rows(
    shell: Shell, trained: Path, kind: str
) -> None:
    if kind == "onnx":
        pytest.importorskip("onnxruntime")
    said = shell("export", trained, "--format", kind)
    assert said.code == 0, said
    (name,) = shell.files()
    assert Path(name).stem == "routed"
    assert f"{name}: " in said.out
    assert "test rows" in said.out
    expected = perdure.load(trained).predict(DIGITS)
    assert np.concatenate(labels_of(name, trained)).tolist() == expected.tolist()
    assert len(set(expected.tolist())) > 1


def test_the_module_has_the_names_of_training_and_copies(trained: Path) -> None:
    model = perdure.load(trained)
    names = set(dict(model.module.named_parameters()))
    assert names == set(model.server.params)
    before = model.predict(DIGITS)
    with torch.no_grad():
        for parameter in model.module.parameters():
            parameter.zero_()
    assert (model.predict(DIGITS) == before).all()
    others = set(model.module.state_dict()) - names
    assert {name.partition(".")[0] for name in others} == {"_input", "_state", "_outputs_of"}


OTHERS: list[dict[str, Any]] = [
    {"model": {"kind": "conv", "width": 4, "norm": "batch"}},
    {"method": {"kind": "fed-l2p", "pool": 3, "top": 2}, "model": {
        "kind": "vit", "init": "random", "width": 8, "heads": 2, "depth": 1, "patch": 4}},
    {"method": {"kind": "fedavg", "with": [{"kind": "calibrate"}]}},
    {"stream": {"kind": "permuted", "tasks": 2}, "model": {"hidden": [8], "head": "growing"}},
]  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {"method": {"kind": "fedprotip", "router": "gaussian", "unknown": 0.01}},
        *(pytest.param(changes, marks=pytest.mark.slow) for changes in OTHERS),
    ],
    ids=["gaussian", "batch norm", "prompts", "calibrate", "one class in two heads"],
)  # fmt: skip
def test_a_program_is_the_module_of_any_method(changes: Any, shell: Shell) -> None:
    model = perdure.run({**TINY, "stream": SPLIT, "train": {"rounds": 1}, **changes}, out="run")
    model = perdure.load("run")
    with torch.no_grad():
        labels = model.module(torch.from_numpy(DIGITS)).argmax(1)
    assert labels.tolist() == model.predict(DIGITS).tolist()
    document = json.loads(shell("export", "run", "--format", "torch-export", "--json").out)
    assert document["file"] == "run.pt2"
    assert document["compared"]["max_difference"] < 1e-6
    program = torch.export.load("run.pt2").module()
    assert program(torch.from_numpy(DIGITS)).argmax(1).tolist() == labels.tolist()


def test_an_operator_that_cannot_be_exported(shell: Shell) -> None:
    pytest.importorskip("onnxruntime")
    method = {"kind": "fedprotip", "router": "gaussian"}
    perdure.run({**TINY, "stream": SPLIT, "method": method}, out="run")
    before = shell.files()
    said = shell("export", "run", "--format", "onnx", "--out", "model.onnx")
    one_sentence(said, "--format onnx", "aten.linalg_cholesky_ex", "cannot be exported")
    assert shell.files() == before


def test_a_file_that_predicts_otherwise_is_not_written(
    shell: Shell, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("model.pt").write_bytes(b"the one before")
    data, scores = portable_model.WRITERS["state_dict"](perdure.load(trained), torch.zeros(0))
    wrong = {"state_dict": lambda *_: (data, lambda x: scores(x)[:, ::-1].copy())}
    monkeypatch.setattr(portable_model, "WRITERS", wrong)
    said = shell("export", trained, "--format", "state_dict", "--out", "model.pt")
    assert said.code == 1
    assert len(said.err.splitlines()) == 1
    assert "differs from predict on" in said.err
    assert Path("model.pt").read_bytes() == b"the one before"
    assert shell.files() == {"model.pt"}


def test_without_the_data_random_rows_are_compared(shell: Shell, tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(2, 5, (40, 3))
    y = (x[:, 0] > 2).astype(int)
    np.savez("x.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    data, stream = {"source": "npz", "path": "x.npz"}, {"kind": "permuted", "tasks": 1}
    perdure.run({**TINY, "data": data, "stream": stream}, out="run")
    Path("x.npz").unlink()
    shutil.copytree("run/model", "shipped")
    for options, reason in (
        (["--trust-code"], "the data cannot be read"),
        ([], "the data is read only with trust=True (--trust-code)"),
    ):
        said = shell("export", "shipped", "--format", "state_dict", *options)
        assert said.code == 0, said
        assert f"256 random rows, since {reason}" in said.out


def test_bad_words(shell: Shell, trained: Path) -> None:
    for words, *parts in (
        (("gone", "--format", "onnx"), "gone"),
        ((trained, "--format", "tflite"), "tflite", "onnx"),
        ((trained, "--format", "state_dict", "--out", "gone/x.pt"), "--out gone/x.pt"),
    ):
        one_sentence(shell("export", *words), *parts)
    assert shell.files() == set()


def test_onnx_without_its_packages(
    shell: Shell, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "onnx", None)
    said = shell("export", trained, "--format", "onnx")
    one_sentence(said, "--format onnx: requires pip install 'perdure[export]'")
