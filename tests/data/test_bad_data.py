"""Data that cannot be learned: one sentence, exit code 2, nothing written; every source alike.

What is wrong with Python objects is in test_python_objects.py, with modules in
tests/models/test_module_refused.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

from perdure.cli.main import main
from perdure.core.rng import Rng
from perdure.data.load import load_source
from perdure.data.sources.image_folder import FolderData

X = np.random.default_rng(0).normal(size=(12, 3))
Y = np.arange(12) % 3


def npz(folder: Path, **changes: Any) -> dict[str, Any]:
    arrays = {"x_train": X, "y_train": Y, "x_test": X, "y_test": Y, **changes}
    np.savez(folder / "d.npz", **arrays)
    return {"source": "npz", "path": str(folder / "d.npz")}


def table(folder: Path, text: str, **keys: Any) -> dict[str, Any]:
    (folder / "d.csv").write_text(text)
    return {"source": "table", "path": str(folder / "d.csv"), **keys}


def lines(folder: Path, *rows: dict[str, Any]) -> dict[str, Any]:
    (folder / "d.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return {"source": "text", "path": str(folder / "d.jsonl")}


def images(folder: Path, counts: dict[str, int], sizes: tuple[int, ...] = (4,)) -> dict[str, Any]:
    for name, count in counts.items():
        (folder / "d" / name).mkdir(parents=True)
        for number in range(count):
            side = sizes[number % len(sizes)]
            Image.new("L", (side, side), number).save(folder / "d" / name / f"{number}.png")
    return {"source": "folder", "path": str(folder / "d")}


def hub(folder: Path, **columns: Any) -> dict[str, Any]:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict(columns).save_to_disk(str(folder / "d"))
    return {"source": "huggingface", "path": str(folder / "d")}


def text(label: Any, split: str, words: str = "a b") -> dict[str, Any]:
    return {"text": words, "label": label, "split": split}


TABLE: dict[str, tuple[Callable[[Path], dict[str, Any]], str]] = {
    "nan in an array": (
        lambda f: npz(f, x_train=np.where(X[4, 1] == X, np.nan, X)),
        "x_train contains a value in row 4 that is NaN",
    ),
    "nan in a table": (
        lambda f: table(f, "a,label\n1,x\nnan,y\n2,x\n3,y\n"),
        "the column 'a' is missing, NaN, infinite or too large in row 2",
    ),
    "a gap in a table": (
        lambda f: table(f, "a,label\n1,x\n,y\n2,x\n3,y\n"),
        "the column 'a' is missing, NaN, infinite or too large in row 2",
    ),
    "an array that is missing": (
        lambda f: npz(f) | {"path": str(_without(f, "y_test"))},
        "y_test not found among x_train, y_train, x_test",
    ),
    "a label column that is missing": (
        lambda f: table(f, "a,kind\n1,x\n2,y\n"),
        "data.label_column: must be a column of the table: a, kind, got 'label'",
    ),
    "a feature column that is missing": (
        lambda f: table(f, "a,label\n1,x\n2,y\n", feature_columns=["b"]),
        "data.feature_columns: must be columns of the table: a, got 'b'",
    ),
    "a column of a dataset that is missing": (
        lambda f: hub(f, text=["a", "b"], kind=[0, 1]),
        "data.label_column: must be a column of the dataset: text, kind, got 'label'",
    ),
    "a text column that is missing": (
        lambda f: lines(f, {"words": "a", "label": 0}),
        "line 1 has no field 'text'",
    ),
    "labels unseen in training: an array": (
        lambda f: npz(f, y_train=np.where(Y == 1, 2, Y)),
        "the label '1' occurs in test rows alone",
    ),
    "labels unseen in training: names": (
        lambda f: npz(f, y_train=np.full(12, "a"), y_test=np.full(12, "b")),
        "y_test contains the label 'b', not one of a",
    ),
    "labels unseen in training: a table": (
        lambda f: table(f, "a,label,s\n1,x,train\n2,y,train\n3,z,test\n", split_column="s"),
        "the label 'z' occurs in test rows alone",
    ),
    "labels unseen in training: texts": (
        lambda f: lines(f, text("x", "train"), text("y", "train"), text("z", "test")),
        "contains the label 'z', not one of x, y",
    ),
    "labels unseen in training: folders": (
        lambda f: images(f, {"train/cat": 2, "train/dog": 2, "test/cat": 1, "test/fox": 1}),
        "must be a folder whose classes all have images in train/ (not 'fox')",
    ),
    "one class: an array": (
        lambda f: npz(f, y_train=Y * 0, y_test=Y * 0),
        "data: must have examples of two classes or more, got only '0'",
    ),
    "one class: a table": (
        lambda f: table(f, "a,label\n1,x\n2,x\n3,x\n"),
        "data: must have examples of two classes or more, got only 'x'",
    ),
    "one class: texts": (
        lambda f: lines(f, text("x", "train"), text("x", "test")),
        "data: must have examples of two classes or more, got only 'x'",
    ),
    "one class: folders": (
        lambda f: images(f, {"cat": 4}),
        "data: must have examples of two classes or more, got only 'cat'",
    ),
    "images of several sizes": (
        lambda f: images(f, {"cat": 4, "dog": 4}, sizes=(4, 6)),
        "data.size: must be a number of pixels, since images differ in size: 4x4",
    ),
    "arrays of several shapes": (
        lambda f: npz(f, x_test=X[:, :2]),
        "x_train has float32 rows of (3,), x_test float32 rows of (2,)",
    ),
    "folders without images": (
        lambda f: images(f, {"cat": 0, "dog": 0}),
        "data.path: must be a folder of class folders with images",
    ),
    "labels of two types": (
        lambda f: lines(f, text("x", "train"), text(1, "train"), text(1, "test")),
        "labels of type int, str, not all strings or all integers",
    ),
}


def _without(folder: Path, name: str) -> Path:
    with np.load(folder / "d.npz") as file:
        np.savez(folder / "e.npz", **{key: file[key] for key in file.files if key != name})
    return folder / "e.npz"


@pytest.mark.parametrize("case", TABLE)
def test_it_is_refused_in_one_sentence(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make, sentence = TABLE[case]
    config = {"data": make(tmp_path), "stream": {"tasks": 2}, "clients": {"count": 1}}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))
    words = ["run", str(tmp_path / "c.yaml"), "--out", str(tmp_path / "run"), "-q"]
    assert main(words) == 2
    error = capsys.readouterr().err
    assert sentence in " ".join(error.split())
    assert "Traceback" not in error
    assert not (tmp_path / "run").exists()


def test_hidden_and_empty_folders_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    images(tmp_path, {"cat": 4, "dog": 4, "fox": 0, "__MACOSX": 3, ".cache": 2})
    (tmp_path / "d" / ".DS_Store").write_bytes(b"x")
    (tmp_path / "d" / "cat" / ".DS_Store").write_bytes(b"x")
    (tmp_path / "d" / "cat" / "._0.png").write_bytes(b"x")
    source = load_source(FolderData(path=str(tmp_path / "d")), Rng(0))
    assert source.class_names == ("cat", "dog")
    assert len(source.train) + len(source.test) == 8
    assert "class folders without images are left out: fox" in caplog.text
    assert "MACOSX" not in caplog.text
