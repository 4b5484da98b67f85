"""The exported model predicts with the accuracy that the run evaluated."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

import perdure
from perdure.config import parse
from perdure.contract import CollectedUploads, Context, Exchange, Method, Needs, Server, Train
from perdure.core.errors import UserError
from perdure.core.rng import Rng
from perdure.data.load import Source, load_source
from perdure.training.settings import with_method_defaults

VALUES: dict[str, Any] = {
    "data": {"limit": 300},
    "stream": {"kind": "split", "tasks": 3, "classes_per_task": 3},
    "clients": {"count": 3},
    "model": {"hidden": [16]},
    "train": {"rounds": 3, "batch_size": 16},
    "engine": {"kind": "serial"},
}


@dataclass(frozen=True)
class Memory:
    """What prediction needs, and what it does not."""

    last: torch.Tensor | None = None
    kept: str = ""


@dataclass(frozen=True)
class Routes(Method):
    """Says that everything is of the newest task, and needs its state to say so."""

    ServerState: ClassVar[type] = Memory

    @property
    def needs(self) -> Needs:
        return Needs(prediction_state=("last",))

    def exchanges(self, context: Context) -> list[Exchange | Train]:
        return [Exchange("begin", participants="none", aggregate=self.begin), Train()]

    def begin(self, server: Server, uploads: CollectedUploads, context: Context) -> Server:
        return replace(server, state=Memory(torch.tensor(context.task), "back"))

    def route(
        self, server: Server, x: torch.Tensor, network: Any, client_state: Any = None
    ) -> torch.Tensor:
        return server.state.last.expand(len(x))


def a_run(folder: Path, **changes: Any) -> perdure.Result:
    return perdure.run({**VALUES, **changes}, out=folder / "run")


def the_source(**changes: Any) -> Source:
    config = parse({**VALUES, **changes})
    return load_source(config.data, Rng(config.seed))


def accuracy(folder: Path, source: Source, classes: Any, x: Any = None) -> float:
    """Of predictions on the test images of some classes, counted here."""
    rows = np.isin(source.test.y.numpy(), list(classes))
    images = source.test.x.numpy() if x is None else x
    found = perdure.load(folder / "run").predict(images[rows])
    return float(np.mean(found == source.test.y.numpy()[rows]))


def task_classes(folder: Path) -> list[list[int]]:
    card = json.loads((folder / "run" / "model" / "card.json").read_text())
    found: list[list[int]] = card["outputs"]["task_classes"]
    return found


@pytest.mark.parametrize(
    "model",
    [
        {"hidden": [16]},
        {"hidden": [16], "head": "growing"},
        {"kind": "conv", "width": 4},
        {"hidden": [16], "norm": "batch", "dropout": 0.3},
    ],
    ids=str,
)
def test_predictions_have_the_accuracy_of_the_evaluation(model: Any, tmp_path: Path) -> None:
    result = a_run(tmp_path, model=model)
    source = the_source()
    for number, classes in enumerate(task_classes(tmp_path)):
        found = accuracy(tmp_path, source, classes)
        assert found == pytest.approx(result.matrix["task_agnostic"][-1][number])
    assert max(result.matrix["task_agnostic"][-1]) > 0.3


def test_a_routing_method_predicts_classes_of_the_predicted_task(tmp_path: Path) -> None:
    result = a_run(tmp_path, method={"kind": f"{__name__}.Routes"})
    for number, classes in enumerate(task_classes(tmp_path)):
        found = accuracy(tmp_path, the_source(), classes)
        assert found == pytest.approx(result.matrix["routed"][-1][number])
    assert result.matrix["routed"][-1][:2] == [0.0, 0.0]
    assert result.values["routing"][-1] == [0.0, 0.0, 1.0]
    assert result.values["metrics"]["routed"]["ACC"] > 0
    loaded = perdure.load(tmp_path / "run").server.state
    assert (int(loaded.last), loaded.kept) == (2, "")


def test_images_of_a_permuted_stream_are_predicted_as_in_its_first_task(tmp_path: Path) -> None:
    result = a_run(tmp_path, stream={"kind": "permuted", "tasks": 2})
    found = accuracy(tmp_path, the_source(), range(10))
    assert found == pytest.approx(result.matrix["task_agnostic"][-1][0])


@pytest.mark.parametrize("data", [{"normalize": False}, {"mean": [0.3], "std": [0.2]}], ids=str)
def test_inputs_are_normalized_as_in_training(data: Any, tmp_path: Path) -> None:
    result = a_run(tmp_path, data={"limit": 300, **data})
    classes = task_classes(tmp_path)[-1]
    found = accuracy(tmp_path, the_source(), classes)
    assert found == pytest.approx(result.matrix["task_agnostic"][-1][-1])


def test_color_images_may_have_channels_first_or_last(tmp_path: Path) -> None:
    """The class is the channel that is brighter, so a mix-up of the axes shows."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 150)
    x = rng.integers(0, 100, (150, 8, 8, 3))
    x[np.arange(150), :, :, y] += 100
    x = x.astype(np.uint8)
    path = tmp_path / "colors.npz"
    np.savez(path, x_train=x[:100], y_train=y[:100], x_test=x[100:], y_test=y[100:])
    data = {"source": "npz", "path": str(path)}
    result = a_run(tmp_path, data=data, stream={"kind": "permuted", "tasks": 1})
    model, images = perdure.load(tmp_path / "run"), x[100:]
    last = model.predict(images)
    first = model.predict(np.moveaxis(images, 3, 1))
    assert last.tolist() == first.tolist() == model.predict(torch.from_numpy(images)).tolist()
    found = np.mean(last == y[100:])
    assert found == pytest.approx(result.matrix["task_agnostic"][0][0])
    assert found > 0.9


def test_gray_images_may_have_a_channel_axis_or_none(tmp_path: Path) -> None:
    a_run(tmp_path)
    images = the_source().test.x.numpy()
    model = perdure.load(tmp_path / "run")
    expected = model.predict(images)
    assert (model.predict(images[:, 0]) == expected).all()
    assert (model.predict(images[:, 0, :, :, None]) == expected).all()
    assert expected.dtype == np.int64


def test_only_classes_of_trained_tasks_are_predicted(tmp_path: Path) -> None:
    """Outputs that never competed in a loss are as they were drawn and may well be the largest."""
    stream = {"kind": "split", "tasks": 2, "classes_per_task": 2}
    a_run(tmp_path, stream=stream, train={"rounds": 1, "lr": 1e-3, "outputs": "task"})
    found = perdure.load(tmp_path / "run").predict(the_source().test.x.numpy())
    assert set(found.tolist()) <= {k for group in task_classes(tmp_path) for k in group}


def test_no_rows_give_no_predictions(tmp_path: Path) -> None:
    a_run(tmp_path)
    assert len(perdure.load(tmp_path / "run").predict(np.zeros((0, 8, 8), np.uint8))) == 0


@pytest.mark.parametrize(
    "x",
    [
        np.zeros((2, 8, 8), np.float32),
        np.zeros((2, 9, 8), np.uint8),
        np.zeros((2, 8, 8, 3), np.uint8),
        np.zeros((2, 16, 4), np.uint8),
        np.zeros((2, 4, 16, 1), np.uint8),
        np.zeros((8, 8), np.uint8),
        np.uint8(3),
    ],
    ids=lambda x: f"{x.dtype}{x.shape}",
)
def test_other_inputs_are_refused(x: Any, tmp_path_factory: Any) -> None:
    folder = tmp_path_factory.getbasetemp() / "for-inputs"
    if not folder.exists():
        a_run(folder)
    with pytest.raises(UserError, match=r"^input: must be (uint8|rows of shape \(1, 8, 8\)), got "):
        perdure.load(folder / "run").predict(x)


def test_the_model_folder_alone_is_enough(tmp_path: Path) -> None:
    a_run(tmp_path)
    images = the_source().test.x.numpy()
    expected = perdure.load(tmp_path / "run").predict(images)
    (tmp_path / "run" / "model").rename(tmp_path / "shipped")
    assert (perdure.load(tmp_path / "shipped").predict(images) == expected).all()


def test_the_card_describes_the_model(tmp_path: Path) -> None:
    a_run(tmp_path)
    card = json.loads((tmp_path / "run" / "model" / "card.json").read_text())
    assert card["shape"] == [1, 8, 8]
    assert card["tasks_seen"] == 3
    assert len(card["class_names"]) == 10
    assert parse(card["config"]) == with_method_defaults(parse(VALUES))


def test_a_damaged_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="contains no trained model"):
        perdure.load(tmp_path)
    a_run(tmp_path)
    file = tmp_path / "run" / "model" / "model.safetensors"
    data = file.read_bytes()
    for harmed in (data[:-1] + bytes([data[-1] ^ 1]), data[:100], b""):
        file.write_bytes(harmed)
        with pytest.raises(UserError, match=r"differs from the hash in card\.json"):
            perdure.load(tmp_path / "run")
    file.write_bytes(data)
    card = tmp_path / "run" / "model" / "card.json"
    text = card.read_text()
    for wrong in ("{", "[]", "{}", '"text"'):
        card.write_text(wrong)
        with pytest.raises(UserError, match=r"card\.json"):
            perdure.load(tmp_path / "run")
    card.write_text(text)
    perdure.load(tmp_path / "run")


@pytest.mark.parametrize(
    ("key", "value"), [("shape", None), ("tasks_seen", 99), ("outputs", {}), ("class_names", 3)]
)
def test_an_invalid_card_is_refused(key: str, value: Any, tmp_path: Path) -> None:
    perdure.run({"stream": {"tasks": 1}, "train": {"rounds": 1}, "data": {"limit": 60}}, tmp_path)
    path = tmp_path / "model" / "card.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(UserError, match=r"card\.json: must describe a model"):
        perdure.load(tmp_path)
