"""Tables, time series and regression, from the command line to predictions.

Metrics are computed again by scikit-learn from what `perdure predict` writes.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_breast_cancer, load_diabetes, load_wine
from sklearn.metrics import (
    accuracy_score,
    f1_score,
    mean_absolute_error,
    r2_score,
    recall_score,
    roc_auc_score,
)

import perdure
from perdure.cli.main import main

Array = np.ndarray[Any, Any]
SETTINGS: dict[str, Any] = {
    "model": {"kind": "mlp", "hidden": [16]},
    "train": {"rounds": 3, "lr": 0.1},
    "seed": 100,
}


class Table:
    """A table of scikit-learn as a CSV file with strings for labels, half of it for testing."""

    def __init__(self, bunch: Any, folder: Path, domains: int = 1) -> None:
        draw = np.random.default_rng(100)
        self.columns = [name.replace(" ", "_") for name in bunch.feature_names]
        self.x, y = bunch.data, bunch.target
        has_names = hasattr(bunch, "target_names")
        self.y = np.array(bunch.target_names)[y] if has_names else y
        self.is_test = draw.random(len(y)) < 0.5
        self.site = np.array(["north", "south", "west"])[draw.integers(0, 3, len(y))]
        self.year = 2020 + draw.integers(0, domains, len(y))
        self.folder = folder
        self.write("all.csv", np.ones(len(y), bool))

    def write(self, name: str, rows: Array) -> Path:
        """Write some of the rows (bool) to a file."""
        with (self.folder / name).open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow([*self.columns, "outcome", "part", "site", "year"])
            for i in np.flatnonzero(rows):
                part = "test" if self.is_test[i] else "train"
                writer.writerow([*self.x[i], self.y[i], part, self.site[i], self.year[i]])
        return self.folder / name

    def config(self, **changes: Any) -> dict[str, Any]:
        """Return the config of a run on the table, whose clients are the sites."""
        data = {"source": "table", "path": str(self.folder / "all.csv")}
        data |= {"label_column": "outcome", "split_column": "part", "domain_column": "year"}
        data |= {"feature_columns": self.columns, **changes.pop("data", {})}
        clients = {"count": None, "partition": {"kind": "column", "name": "site"}}
        return {**SETTINGS, "data": data, "clients": clients, **changes}

    def predicted(self, run: Path, rows: Array) -> list[dict[str, str]]:
        """Return the rows that `perdure predict` writes for some rows."""
        path, out = self.write("some.csv", rows), self.folder / "predictions.csv"
        assert main(["predict", str(run), str(path), "--out", str(out)]) == 0
        with out.open(encoding="utf-8") as file:
            return list(csv.DictReader(file))


def trained(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return result.json of a run and its report from the command line."""
    (folder / "config.yaml").write_text(json.dumps(config), encoding="utf-8")
    assert main(["run", str(folder / "config.yaml"), "--out", str(folder / "run"), "--quiet"]) == 0
    assert main(["report", str(folder / "run"), "--html", str(folder / "page.html")]) == 0
    values: dict[str, Any] = json.loads((folder / "run" / "result.json").read_bytes())
    return values


def probabilities(run: Path, x: Array) -> Array:
    logits = perdure.load(run).module(torch.from_numpy(x))
    return logits.detach().double().softmax(1).numpy()


METRICS = ["accuracy", "macro_f1", "auroc", "sensitivity", "specificity", "ece", "worst_client"]


def test_two_classes_of_a_table(tmp_path: Path) -> None:
    table = Table(load_breast_cancer(), tmp_path)
    stream, evaluate = {"kind": "permuted", "tasks": 2}, {"metrics": METRICS}
    values = trained(table.config(stream=stream, evaluate=evaluate), tmp_path)
    scores = {name: values["scores"][name]["task_agnostic"][1][0] for name in METRICS}
    y, rows = table.y[table.is_test], table.predicted(tmp_path / "run", table.is_test)
    predicted = [row["class"] for row in rows]
    positive = probabilities(tmp_path / "run", table.x[table.is_test].astype(np.float32))[:, 1]
    assert set(predicted) == {"benign", "malignant"}
    assert scores["accuracy"] == pytest.approx(accuracy_score(y, predicted))
    assert scores["macro_f1"] == pytest.approx(f1_score(y, predicted, average="macro"))
    assert scores["auroc"] == pytest.approx(roc_auc_score(y == "malignant", positive), abs=2e-3)
    recalls = {k: recall_score(y, predicted, pos_label=k) for k in ("malignant", "benign")}
    assert scores["sensitivity"] == pytest.approx(recalls["malignant"])
    assert scores["specificity"] == pytest.approx(recalls["benign"])
    assert "auroc on each task after each task" in (tmp_path / "page.html").read_text("utf-8")


def test_clients_and_domains_of_a_table(tmp_path: Path) -> None:
    table = Table(load_wine(), tmp_path, domains=2)
    stream, metrics = {"kind": "domains"}, ["macro_f1", "auroc", "worst_client"]
    values = trained(table.config(stream=stream, evaluate={"metrics": metrics}), tmp_path)
    for task, year in enumerate((2020, 2021)):
        chosen = table.is_test & (table.year == year)
        y, site = table.y[chosen], table.site[chosen]
        predicted = np.array([r["class"] for r in table.predicted(tmp_path / "run", chosen)])
        last = {name: values["scores"][name]["task_aware"][1][task] for name in metrics}
        assert values["matrix"]["task_aware"][1][task] == pytest.approx(np.mean(predicted == y))
        assert last["macro_f1"] == pytest.approx(f1_score(y, predicted, average="macro"))
        scores = probabilities(tmp_path / "run", table.x[chosen].astype(np.float32))
        exact = [roc_auc_score(y == k, scores[:, i]) for i, k in enumerate(np.unique(table.y))]
        assert last["auroc"] == pytest.approx(np.mean(exact), abs=2e-3)
        accuracies = []
        for number, name in enumerate(values["clients"]["names"]):
            rows, known = site == name, values["client_scores"][task][str(number)]
            f1 = f1_score(y[rows], predicted[rows], average="macro", labels=np.unique(y[rows]))
            assert known["macro_f1"]["task_aware"] == pytest.approx(f1)
            accuracies.append(np.mean(predicted[rows] == y[rows]))
        assert last["worst_client"] == pytest.approx(min(accuracies))
    page = (tmp_path / "page.html").read_text("utf-8")
    assert "macro_f1 of each client" in page
    assert "north" in page


def test_time_series_in_an_npz_file(tmp_path: Path) -> None:
    """Two channels of 24 values; the class is the frequency, which tasks add."""
    draw, moments = np.random.default_rng(100), np.arange(24) / 24
    y = draw.integers(0, 4, 400)
    phase = draw.uniform(0, 1, (400, 2, 1))
    x = np.sin(2 * np.pi * ((y[:, None, None] + 1) * moments + phase))
    x = (x + draw.normal(0, 0.1, x.shape)).astype(np.float32)
    arrays = {"x_train": x[:300], "y_train": y[:300], "x_test": x[300:], "y_test": y[300:]}
    np.savez(tmp_path / "waves.npz", **arrays)
    data = {"source": "npz", "path": str(tmp_path / "waves.npz")}
    config = {**SETTINGS, "data": data, "stream": {"kind": "split", "tasks": 2},
              "clients": {"count": 3}, "evaluate": {"metrics": ["macro_f1"]}}  # fmt: skip
    values = trained(config, tmp_path)
    out = tmp_path / "predictions.npy"
    assert main(["predict", str(tmp_path / "run"), data["path"], "--out", str(out)]) == 0
    predicted, y = np.load(out), y[300:]
    classes = perdure.load(tmp_path / "run").network.outputs.task_classes
    for task in range(2):
        rows = np.isin(y, classes[task])
        f1 = f1_score(y[rows], predicted[rows], average="macro", labels=classes[task])
        assert values["scores"]["macro_f1"]["task_agnostic"][1][task] == pytest.approx(f1)
        last = values["matrix"]["task_agnostic"][1][task]
        assert last == pytest.approx(np.mean(predicted[rows] == y[rows]))


def test_regression_on_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = Table(load_diabetes(), tmp_path, domains=2)
    evaluate = {"metrics": ["mae", "r2", "worst_client"]}
    config = table.config(stream={"kind": "domains"}, data={"target": "number"}, evaluate=evaluate)
    values = trained(config, tmp_path)
    assert " r2 ACC " in capsys.readouterr().out
    assert values["measure"] == "r2"
    assert values["scores"]["r2"] == values["matrix"]
    for task, year in enumerate((2020, 2021)):
        chosen = table.is_test & (table.year == year)
        y, site = table.y[chosen], table.site[chosen]
        rows = table.predicted(tmp_path / "run", chosen)
        predicted = np.array([float(row["number"]) for row in rows])
        scores = {n: values["scores"][n]["task_agnostic"][1][task] for n in evaluate["metrics"]}
        assert scores["mae"] == pytest.approx(mean_absolute_error(y, predicted), rel=1e-5)
        assert scores["r2"] == pytest.approx(r2_score(y, predicted), rel=1e-5)
        by_site = {name: site == name for name in values["clients"]["names"]}
        r2 = [r2_score(y[rows], predicted[rows]) for rows in by_site.values()]
        assert scores["worst_client"] == pytest.approx(min(r2), rel=1e-5)
        for number, rows in enumerate(by_site.values()):
            mae = values["client_scores"][task][str(number)]["mae"]["task_agnostic"]
            assert mae == pytest.approx(mean_absolute_error(y[rows], predicted[rows]), rel=1e-5)
    page = (tmp_path / "page.html").read_text("utf-8")
    assert "R2 on each task after each task" in page
    assert "Accuracy" not in page


def test_numbers_from_python(tmp_path: Path) -> None:
    """R2 of the run, after its rounds, is near that of least squares on all rows together."""
    bunch = load_diabetes()
    arrays = {"x_train": bunch.data[:300], "y_train": bunch.target[:300],
              "x_test": bunch.data[300:], "y_test": bunch.target[300:]}  # fmt: skip
    np.savez(tmp_path / "d.npz", **arrays)
    data = {"source": "npz", "path": str(tmp_path / "d.npz"), "target": "number"}
    config = {**SETTINGS, "data": data, "stream": {"kind": "permuted", "tasks": 1},
              "train": {"rounds": 20, "lr": 0.02}, "clients": {"count": 4}}  # fmt: skip
    result = perdure.run(config, out=tmp_path / "run")
    x = np.hstack([arrays["x_train"], np.ones((300, 1))])
    weights = np.linalg.lstsq(x, arrays["y_train"], rcond=None)[0]
    linear = np.hstack([arrays["x_test"], np.ones((142, 1))]) @ weights
    assert result.matrix["task_aware"][0][0] > r2_score(arrays["y_test"], linear) - 0.1
    predicted = perdure.load(tmp_path / "run").predict(arrays["x_test"])
    expected = r2_score(arrays["y_test"], predicted)
    assert result.matrix["task_aware"][0][0] == pytest.approx(expected, rel=1e-5)
    assert predicted.dtype == np.float64


@pytest.mark.parametrize("columns", [False, True])
def test_numbers_in_python_objects(columns: bool) -> None:
    """One data set per task, as arrays and as data frames."""
    pandas = pytest.importorskip("pandas")
    bunch = load_diabetes()
    halves = [slice(0, 220), slice(220, None)]
    parts: list[Any] = [(bunch.data[half], bunch.target[half]) for half in halves]
    if columns:
        parts = [pandas.DataFrame(x).assign(label=y).rename(columns=str) for x, y in parts]
    config = {**SETTINGS, "data": {"target": "number"}, "stream": {"kind": "given"},
              "clients": {"count": 3}}  # fmt: skip
    result = perdure.run(config, data=parts)
    assert result.measure == "r2"
    assert 30 < result.scores["mae"]["task_agnostic"][1][1] < 80


def test_a_regression_is_extended_with_new_data(tmp_path: Path) -> None:
    bunch = load_diabetes()
    for number, half in enumerate((slice(0, 220), slice(220, None))):
        x, y = bunch.data[half], bunch.target[half] * (1 + number)
        arrays = {"x_train": x[:160], "y_train": y[:160], "x_test": x[160:], "y_test": y[160:]}
        np.savez(tmp_path / f"{number}.npz", **arrays)
    paths = [{"source": "npz", "path": str(tmp_path / f"{number}.npz")} for number in range(2)]
    config = {**SETTINGS, "data": {**paths[0], "target": "number"}, "clients": {"count": 3},
              "stream": {"kind": "permuted", "tasks": 1}, "extensions": [{"data": [paths[1]]}],
              "train": {"rounds": 20, "lr": 0.02}}  # fmt: skip
    values = perdure.run(config).values
    assert values["scores"]["mae"]["task_agnostic"][1][1] < 120
