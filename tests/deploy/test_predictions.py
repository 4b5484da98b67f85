"""Predictions of a trained model: probabilities, tasks and margins, and rows of mixed tasks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import softmax

import perdure
from perdure.config import parse
from perdure.contract.method import NO_TASK, best_tasks, task_margins
from perdure.core.rng import Rng
from perdure.data.load import Source, load_source
from perdure.deploy.predictions import OutputMap
from perdure.models.network import Outputs

VALUES: dict[str, Any] = {
    "data": {"limit": 400},
    "stream": {"kind": "split", "tasks": 3, "classes_per_task": 2},
    "clients": {"count": 3},
    "model": {"hidden": [32]},
    "train": {"rounds": 4, "batch_size": 16},
    "engine": {"kind": "serial"},
}
BATCH = {"kind": "fedprotip", "routing": "batch", "routing_batch": 16}
VIT = {"kind": "vit", "init": "random", "width": 8, "heads": 2, "depth": 5, "patch": 4}
GAUSSIAN = {"kind": "fedprotip", "router": "gaussian", "unknown": 1e-3}


def a_run(folder: Path, **changes: Any) -> perdure.Result:
    return perdure.run({**VALUES, **changes}, out=folder / "run")


def rows_of_the_data() -> Source:
    config = parse(VALUES)
    return load_source(config.data, Rng(config.seed))


def seen_rows(folder: Path) -> tuple[list[np.ndarray[Any, Any]], list[np.ndarray[Any, Any]]]:
    """Images and labels of the test rows of each task."""
    card = json.loads((folder / "run" / "model" / "card.json").read_text())
    x, y = (part.numpy() for part in (rows_of_the_data().test.x, rows_of_the_data().test.y))
    chosen = [np.isin(y, classes) for classes in card["outputs"]["task_classes"]]
    return [x[rows] for rows in chosen], [y[rows] for rows in chosen]


@pytest.mark.parametrize("router", ["references", "gaussian"])
def test_a_mixed_batch_is_not_routed_as_one_task(router: str, tmp_path: Path) -> None:
    """With `routing: batch` the class of a row does not depend on the rows beside it."""
    result = a_run(tmp_path, method={**BATCH, "router": router})
    model, (x, y) = perdure.load(tmp_path / "run"), seen_rows(tmp_path)
    images, labels = np.concatenate(x), np.concatenate(y)
    order = np.random.default_rng(0).permutation(len(labels))
    mixed = model.predict(images[order])
    assert (mixed == model.predict(images)[order]).all()
    alone = [int(model.predict(images[row : row + 1])[0]) for row in order[:20]]
    assert mixed[:20].tolist() == alone
    routed = [np.mean(model.predict(a, same_task=True) == b) for a, b in zip(x, y, strict=True)]
    assert routed == pytest.approx(result.matrix["routed"][-1])
    batches = model.predict(images[order], same_task=True)
    assert np.mean(mixed == labels[order]) > np.mean(batches == labels[order]) + 0.1
    tasks = model.predict_tasks(images[order], same_task=True)
    assert tasks is not None
    assert len(set(tasks[:16])) == 1
    assert len(set(model.predict_tasks(images[order])[:16])) > 1


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model": {"hidden": [16], "head": "growing"}},
        {"stream": {"kind": "permuted", "tasks": 2}, "model": {"hidden": [16], "head": "growing"}},
        {"method": {"kind": "fedprotip"}},
        {"method": GAUSSIAN},
        {"method": {"kind": "pip", "pool": 3}, "model": VIT, "train": {"rounds": 1}},
    ],
    ids=["shared", "growing", "one class in two heads", "references", "gaussian", "pip"],
)
def test_probabilities_agree_with_predictions(changes: Any, tmp_path: Path) -> None:
    a_run(tmp_path, **changes)
    model, x = perdure.load(tmp_path / "run"), rows_of_the_data().test.x.numpy()
    found = model.probabilities(x)
    np.testing.assert_allclose(found.sum(1), 1, atol=1e-12)
    labels = model.predict(x)
    assert found.argmax(1).tolist() == labels.tolist()
    seen = sorted({c for group in model.network.outputs.task_classes for c in group})
    assert (found[:, np.setdiff1d(np.arange(10), seen)] == 0).all()
    rows = model.predict(x, details=True)
    assert [row.label for row in rows] == labels.tolist()
    assert [row.class_name for row in rows] == [model.class_names[label] for label in labels]
    np.testing.assert_allclose([row.probability for row in rows], found.max(1))
    tasks = model.predict_tasks(x)
    if tasks is None:
        assert {(row.task, row.margin, row.known) for row in rows} == {(None, None, True)}
        return
    assert [NO_TASK if row.task is None else row.task for row in rows] == tasks.tolist()
    assert [row.known for row in rows] == [task != NO_TASK for task in tasks]
    margins = [row.margin for row in rows if row.known]
    assert all(margin is not None and margin >= 0 for margin in margins)
    for row in rows:
        classes = model.network.outputs.task_classes[row.task] if row.task is not None else seen
        assert row.label in classes


def test_probabilities_are_the_softmax_of_the_logits_of_all_tasks_so_far(tmp_path: Path) -> None:
    a_run(tmp_path, model={"hidden": [32], "head": "shared"})
    model, x = perdure.load(tmp_path / "run"), rows_of_the_data().test.x[:50]
    weights = {name: value.double().numpy() for name, value in model.server.params.items()}
    first, head = (name.removesuffix(".weight") for name in weights if name.endswith("weight"))
    rows = x.flatten(1).double().numpy() * model.scale.numpy() + model.shift.numpy()
    hidden = np.maximum(rows @ weights[f"{first}.weight"].T + weights[f"{first}.bias"], 0)
    logits = hidden @ weights[f"{head}.weight"].T + weights[f"{head}.bias"]
    seen = sorted({c for group in model.network.outputs.task_classes for c in group})
    expected = softmax(logits[:, seen], axis=1)
    np.testing.assert_allclose(model.probabilities(x)[:, seen], expected, atol=1e-5)


def test_a_row_that_fits_no_task_is_not_known(tmp_path: Path) -> None:
    a_run(tmp_path, method=GAUSSIAN)
    model = perdure.load(tmp_path / "run")
    noise = np.random.default_rng(0).integers(0, 256, (40, 8, 8), dtype=np.uint8)
    rows = model.predict(noise, details=True)
    unknown = [row for row in rows if not row.known]
    assert len(unknown) > 10
    assert {(row.task, row.margin) for row in unknown} == {(None, None)}


def test_no_rows(tmp_path: Path) -> None:
    a_run(tmp_path)
    model, none = perdure.load(tmp_path / "run"), np.zeros((0, 8, 8), np.uint8)
    assert model.probabilities(none).shape == (0, 10)
    assert model.predict(none, details=True) == []


def test_margins_are_the_best_score_minus_the_second() -> None:
    inf = torch.inf
    scores = torch.tensor([[3.0, 1.0, 2.5], [-inf, 4.0, -inf], [-inf, -inf, -inf], [1.0, 1.0, 0.0]])
    assert best_tasks(scores).tolist() == [0, 1, NO_TASK, 0]
    margins = task_margins(scores)
    assert margins[[0, 3]].tolist() == [0.5, 0.0]
    assert margins[[1, 2]].isnan().all()
    assert task_margins(torch.ones(2, 1)).isnan().all()


def test_a_class_of_several_tasks_has_the_largest_of_its_outputs() -> None:
    outputs = Outputs("growing", 4, ((2, 0), (0, 3)))
    logits = torch.tensor([[1.0, 5.0, 6.0, 2.0], [1.0, 5.0, 4.0, -torch.inf]])
    found = OutputMap.of(outputs, last_task=1).class_scores(logits, None)
    assert found.tolist() == [[6.0, -torch.inf, 1.0, 2.0], [5.0, -torch.inf, 1.0, -torch.inf]]
    routed = OutputMap.of(outputs, last_task=1).class_scores(logits, torch.tensor([0, -1]))
    assert routed[0].tolist() == [5.0, -torch.inf, 1.0, -torch.inf]
    assert routed[1].tolist() == found[1].tolist()
    assert OutputMap.of(outputs, last_task=0).class_scores(logits[:1, :2], None)[0].tolist() == [
        5.0, -torch.inf, 1.0, -torch.inf,
    ]  # fmt: skip
