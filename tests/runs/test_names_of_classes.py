"""Names of classes and tasks reach the result, the report and predictions, from every source."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from torch.utils.data import Dataset

import perdure
from perdure.cli.main import main

BASE: dict[str, Any] = {
    "clients": {"count": 2},
    "train": {"rounds": 2},
    "engine": {"kind": "serial"},
    "stream": {"kind": "split", "tasks": 2, "order": ["owl", "cat", "fox", "dog"]},
}
NAMES = ["cat", "dog", "fox", "owl"]
Y = np.arange(40) % 4
X = (np.random.default_rng(0).integers(0, 20, (40, 4, 4)) + 60 * Y[:, None, None]).astype(np.uint8)


class Named(Dataset[Any]):
    """Images with the attribute `classes`."""

    classes = tuple(NAMES)

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        return Image.fromarray(X[index]), int(Y[index])


def arrays(_: Path) -> tuple[dict[str, Any], Any]:
    return {}, (X, [NAMES[label] for label in Y])


def frame(_: Path) -> tuple[dict[str, Any], Any]:
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame(X.reshape(40, 16), columns=[f"p{i}" for i in range(16)])
    return {"label_column": "animal"}, table.assign(animal=[NAMES[label] for label in Y])


def dataset(_: Path) -> tuple[dict[str, Any], Any]:
    return {}, Named()


def hub(_: Path) -> tuple[dict[str, Any], Any]:
    datasets = pytest.importorskip("datasets")
    kinds = {"image": datasets.Image(), "label": datasets.ClassLabel(names=NAMES)}
    values = {"image": list(X), "label": Y.tolist()}
    return {}, datasets.Dataset.from_dict(values, features=datasets.Features(kinds))


def folder(path: Path) -> tuple[dict[str, Any], Any]:
    for index, label in enumerate(Y):
        place = path / "images" / NAMES[label]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(X[index]).save(place / f"{index}.png")
    return {"source": "folder", "path": str(path / "images")}, None


def npz(path: Path) -> tuple[dict[str, Any], Any]:
    np.savez(path / "d.npz", x=X, y=Y, class_names=np.array(NAMES))
    return {"source": "npz", "path": str(path / "d.npz")}, None


@pytest.mark.parametrize("make", [arrays, frame, dataset, hub, folder, npz])
def test_class_names(make: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    section, data = make(tmp_path)
    out = tmp_path / "run"
    perdure.run(BASE | {"data": section} if section else BASE, data=data, out=out)
    result = json.loads((out / "result.json").read_text())
    assert result["task_classes"] == [["cat", "owl"], ["dog", "fox"]]
    assert result["task_names"] == ["classes cat owl", "classes dog fox"]
    page = (out / "report.html").read_text()
    assert "classes cat owl" in page
    assert "dog, fox" in page
    model = perdure.load(out)
    inputs = data.drop(columns="animal") if make is frame else X
    assert {model.class_names[label] for label in model.predict(inputs)} <= set(NAMES)
    if make is not frame:
        np.save(tmp_path / "new.npy", X[:4])
        capsys.readouterr()
        assert main(["predict", str(out), str(tmp_path / "new.npy"), "--json"]) == 0
        assert {row["class"] for row in json.loads(capsys.readouterr().out)} <= set(NAMES)


def test_names_of_domains(tmp_path: Path) -> None:
    sites = np.array(["north", "south"])[np.arange(40) // 20]
    data = {"x": X, "y": [NAMES[label] for label in Y], "domain": sites}
    config = BASE | {"stream": {"kind": "domains", "order": ["south", "north"]}}
    result = perdure.run(config, data=data, out=tmp_path / "run")
    assert result.values["task_names"] == ["south", "north"]
    assert "south" in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.slow
def test_a_comparison_trains_on_given_data(tmp_path: Path) -> None:
    config = BASE | {"runs": {"report": False}}
    data = (X, [NAMES[label] for label in Y])
    outcome = perdure.compare(
        config, "fedavg,fedprox", [100], out=tmp_path / "c", references="none", jobs=1, data=data
    )
    assert outcome.failures == ()
    alone = perdure.run(config | {"seed": 100, "method": {"kind": "fedavg"}}, data=data)
    saved = json.loads((tmp_path / "c" / "fedavg" / "seed-100" / "result.json").read_text())
    assert saved["model_sha256"] == alone.values["model_sha256"]
    with pytest.raises(perdure.UserError, match=r"^data: must be a function that other processes"):
        perdure.compare(
            {"stream": {"tasks": 2}}, "fedavg", [100], out=tmp_path / "d", data=lambda task: data
        )
