"""Arrays of numbers: feature vectors, time series and images with any number of channels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.preprocessing import StandardScaler

import perdure
from perdure.config import parse
from perdure.core.errors import UserError
from perdure.core.rng import Rng
from perdure.data.examples import Examples, Source
from perdure.data.load import load_domains, load_source
from perdure.data.normalization import normalize_source
from perdure.data.sources.arrays import DigitsData, NpzData
from perdure.methods.parts.replay import StoredExamples, model_inputs, raw_rows
from perdure.training.experiment import build_experiment

CLASSES = ("maple", "oak", "pine")


def arrays(shape: tuple[int, ...], dtype: Any = np.float64) -> dict[str, Any]:
    """Return rows whose values tell their class, on a separate scale for every feature."""
    rng = np.random.default_rng(7)
    y = np.arange(120) % 3
    scales = 10.0 ** rng.integers(-4, 4, shape)
    x = (rng.normal(size=(120, *shape)) + 2 * y.reshape(-1, *[1] * len(shape))) * scales + scales
    names = np.array(CLASSES)
    parts = {"x_train": x[:90], "y_train": names[y[:90]], "x_test": x[90:], "y_test": names[y[90:]]}
    return {key: v.astype(dtype) if key.startswith("x") else v for key, v in parts.items()}


def write(folder: Path, **values: Any) -> NpzData:
    np.savez(folder / "numbers.npz", **values)
    return NpzData(path=str(folder / "numbers.npz"))


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.int64])
def test_features_are_normalized_one_by_one_as_scikit_learn_does(tmp_path, dtype):
    values = arrays((6,))
    for key in ("x_train", "x_test"):
        values[key] = np.clip(values[key] * 100, -1e4, 1e4).astype(dtype)
    config = write(tmp_path, **values)
    source = load_source(config, Rng(0))
    assert source.train.x.dtype == torch.float32
    assert source.class_names == CLASSES
    assert [source.class_names[label] for label in source.test.y] == values["y_test"].tolist()
    source = normalize_source(source, config)
    train, test = source.train, source.test
    scaler = StandardScaler().fit(values["x_train"].astype(np.float64))
    varies = scaler.var_ > 0
    expected = scaler.transform(values["x_test"].astype(np.float64))[:, varies]
    assert np.allclose(test.gather(torch.arange(30)).numpy()[:, varies], expected, atol=2e-4)
    assert train.rows.element_size() == 4


def test_time_series_are_normalized_by_channel(tmp_path):
    config = write(tmp_path, **arrays((4, 25)))
    source = load_source(config, Rng(0))
    assert source.shape == (4, 25)
    train = normalize_source(source, config).train
    values = train.gather(torch.arange(90)).double()
    assert torch.allclose(values.mean((0, 2)), torch.zeros(4).double(), atol=1e-4)
    assert torch.allclose(values.std((0, 2), correction=0), torch.ones(4).double(), atol=1e-4)


@pytest.mark.parametrize("dtype", [np.float32, np.uint8])
@pytest.mark.parametrize("channels", [2, 4, 13])
def test_images_may_have_any_number_of_channels(tmp_path, dtype, channels):
    values = arrays((5, 6, channels))
    if dtype == np.uint8:
        values |= {k: (values[k] % 256).astype(dtype) for k in ("x_train", "x_test")}
    config = write(tmp_path, **values)
    source = load_source(config, Rng(0))
    assert source.shape == (channels, 5, 6)
    assert np.array_equal(
        source.test.x.numpy(), values["x_test"].transpose(0, 3, 1, 2).astype(dtype)
    )
    train = normalize_source(source, config).train
    gathered = train.gather(torch.arange(90))
    assert torch.allclose(gathered.mean((0, 2, 3)), torch.zeros(channels), atol=1e-4)


def test_a_constant_or_tiny_feature_stays_finite():
    x = torch.randn(50, 3) * torch.tensor([1e-12, 1.0, 0.0]) + torch.tensor([0.0, 0.0, 1e6])
    rows = Examples(x, torch.zeros(50, dtype=torch.int64))
    train = normalize_source(Source("rows", rows, rows, ("0",)), DigitsData()).train
    values = train.gather(torch.arange(50))
    assert torch.allclose(values.std(0, correction=0), torch.tensor([1.0, 1.0, 0.0]), atol=1e-3)
    assert values[:, 2].abs().max() < 1.0


def test_float_images_can_be_resized_and_made_gray(tmp_path):
    values = arrays((4, 4, 3))
    values |= {key: np.full_like(values[key], 0.25) for key in ("x_train", "x_test")}
    config = write(tmp_path, **values).model_copy(update={"size": 8, "channels": 1})
    source = load_source(config, Rng(0))
    assert source.shape == (1, 8, 8)
    assert torch.allclose(source.train.x, torch.tensor(0.25))
    many = write(tmp_path, **arrays((4, 4, 5))).model_copy(update={"channels": 3})
    with pytest.raises(UserError, match=r"^data\.channels: must be null for images with 5 chan"):
        load_source(many, Rng(0))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e300])
def test_values_that_are_not_finite_are_refused(tmp_path, bad):
    values = arrays((6,))
    values["x_test"][4, 2] = bad
    with pytest.raises(UserError, match=r"^data\.path: .*x_test contains a value in row 4 that is"):
        load_source(write(tmp_path, **values), Rng(0))


def test_labels_that_training_does_not_have_are_refused(tmp_path):
    values = arrays((6,))
    values["y_test"] = np.array(["elm"] * 30)
    with pytest.raises(UserError, match=r"y_test contains the label 'elm', not one of maple, oak"):
        load_source(write(tmp_path, **values), Rng(0))


def test_class_names_order_labels_that_are_strings(tmp_path):
    names = np.array(["pine", "oak", "maple", "elm"])
    source = load_source(write(tmp_path, **arrays((6,)), class_names=names), Rng(0))
    assert source.class_names == tuple(names)
    assert source.train.y[:3].tolist() == [2, 1, 0]


def test_one_class_is_refused(tmp_path):
    values = arrays((6,))
    config = write(
        tmp_path, **{**values, "y_train": np.full(90, "oak"), "y_test": np.full(30, "oak")}
    )
    with pytest.raises(
        UserError, match=r"^data: must have examples of two classes or more, got on"
    ):
        build_experiment(parse({"data": {"source": "npz", "path": config.path}}))


def test_domains_of_numbers(tmp_path):
    x = np.random.default_rng(0).normal(size=(40, 5))
    values = {"x": x, "y": np.array(["a", "b"])[np.arange(40) % 2]}
    values |= {"domain": np.arange(40) // 20, "is_test": np.arange(40) % 5 == 0}
    sources = load_domains(write(tmp_path, **values), Rng(0))
    assert [source.shape for source in sources] == [(5,), (5,)]
    assert np.allclose(sources[1].test.x, x[(values["domain"] == 1) & values["is_test"]])
    assert sources[0].class_names == ("a", "b")


def test_domains_of_different_types_are_refused(tmp_path):
    config = write(tmp_path, **arrays((8, 8, 1)))
    domains = [{"source": "npz", "path": config.path}, {"source": "digits"}]
    values = {"stream": {"kind": "domains", "domains": domains, "labels": "separate"}}
    with pytest.raises(UserError, match=r"one type of values, got numbers float32, digits uint8"):
        build_experiment(parse(values))


def test_stored_examples_of_numbers_are_what_the_model_received():
    rows = torch.tensor([[0.5, -2e3], [1.25, 7e3]])
    one = torch.ones(1, 2)
    stored = StoredExamples(rows, torch.zeros(2).long(), torch.zeros(2).long(), one / 4, one * 3)
    x = model_inputs(stored, torch.arange(2), (2,))
    assert torch.equal(x, rows / 4 + 3)
    assert torch.allclose(raw_rows(stored, torch.arange(2), x), rows)


@pytest.mark.parametrize("shape", [(6,), (2, 9), (3, 4, 2)], ids=str)
@pytest.mark.parametrize("method", ["fedavg", "er", "stamp"])
def test_a_run_on_numbers_predicts_as_it_evaluated(tmp_path, shape, method):
    values = arrays(shape)
    config = write(tmp_path, **values)
    result = perdure.run(
        {
            "data": {"source": "npz", "path": config.path},
            "stream": {"kind": "split", "tasks": 2, "classes_per_task": 1},
            "clients": {"count": 2},
            "model": {"hidden": [12]},
            "train": {"rounds": 2},
            "method": {"kind": method},
            "engine": {"kind": "serial"},
        },
        out=tmp_path / "run",
    )
    model = perdure.load(tmp_path / "run")
    found = model.predict(values["x_test"])
    groups = model.network.outputs.task_classes
    for row, classes in zip(result.matrix["task_agnostic"][-1], groups, strict=True):
        rows = np.isin(values["y_test"], [model.class_names[label] for label in classes])
        named = np.array(model.class_names)[found[rows]]
        assert np.mean(named == values["y_test"][rows]) == pytest.approx(row)
    card = json.loads((tmp_path / "run/model/card.json").read_text())
    assert card["dtype"] == "float32"
    with pytest.raises(UserError, match="finite"):
        model.predict(np.full_like(values["x_test"], np.nan))
