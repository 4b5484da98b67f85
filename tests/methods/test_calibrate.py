"""Head calibration: Gaussians of classes against numpy, the head against closed-form references."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import multivariate_normal
from torch import Tensor

import perdure
from perdure.config import parse
from perdure.contract import Method
from perdure.core.errors import UserError
from perdure.methods.parts.closed_form import ClassGaussians, class_sums, fit_drift
from perdure.methods.registry import KINDS, find
from perdure.models.ops import ForwardPass
from perdure.training.experiment import Experiment, build_experiment
from perdure.training.loop import run_stream
from perdure.training.state import RunState

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
from combinations import refusal  # type: ignore[attr-defined]

OUTPUTS, SIZE = 3, 5
VALUES: dict[str, Any] = {
    "data": {"limit": 300},
    "stream": {"kind": "split", "tasks": 3, "classes_per_task": 2},
    "clients": {"count": 4, "partition": {"kind": "dirichlet", "alpha": 1.0}},
    "model": {"hidden": [12]},
    "train": {"rounds": 2, "batch_size": 16},
    "engine": {"kind": "serial"},
}


def examples(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(OUTPUTS, (rows,), generator=generator)
    return torch.randn(rows, SIZE, generator=generator).double() + labels[:, None], labels


def expected(features: Tensor, labels: Tensor, per_class: bool) -> tuple[Any, Any]:
    parts = [features[labels == c].numpy() for c in range(OUTPUTS)]
    means = np.stack([part.mean(0) for part in parts])
    covariances = np.stack([np.cov(part.T, bias=True) for part in parts])
    weights = np.array([len(part) for part in parts]) / len(features)
    return means, covariances if per_class else np.tensordot(weights, covariances, 1)[None]


@pytest.mark.parametrize("per_class", [True, False])
def test_gaussians_of_tasks_join_to_those_of_all_examples(per_class: bool) -> None:
    (x, y), (more, labels) = examples(60, 0), examples(40, 1)
    one = ClassGaussians.from_sums(class_sums(x, y, OUTPUTS, per_class))
    two = ClassGaussians.from_sums(class_sums(more, labels, OUTPUTS, per_class))
    found = one.merged(two)
    means, covariances = expected(torch.cat([x, more]), torch.cat([y, labels]), per_class)
    np.testing.assert_allclose(found.mean, means, atol=1e-10)
    np.testing.assert_allclose(found.covariance, covariances, atol=1e-10)
    assert found.count.tolist() == torch.bincount(torch.cat([y, labels])).tolist()


def test_the_shared_covariance_is_the_weighted_mean_of_the_classes() -> None:
    x, y = examples(80, 2)
    each = ClassGaussians.from_sums(class_sums(x, y, OUTPUTS, per_class=True))
    shared = ClassGaussians.from_sums(class_sums(x, y, OUTPUTS, per_class=False))
    torch.testing.assert_close(each.shared_covariance(), shared.shared_covariance())


@pytest.mark.parametrize("per_class", [True, False])
def test_moved_gaussians_are_those_of_moved_features(per_class: bool) -> None:
    x, y = examples(60, 3)
    matrix = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(4)).double()
    moved = ClassGaussians.from_sums(class_sums(x, y, OUTPUTS, per_class)).moved(matrix)
    direct = ClassGaussians.from_sums(class_sums(x @ matrix, y, OUTPUTS, per_class))
    torch.testing.assert_close(moved.mean, direct.mean)
    torch.testing.assert_close(moved.covariance, direct.covariance)


def test_drift_is_found_exactly_where_it_is_linear_and_nothing_moves_without_data() -> None:
    x, _ = examples(60, 5)
    matrix = torch.eye(SIZE).double() + 0.3 * torch.randn(SIZE, SIZE).double()
    found = fit_drift(x.T @ x, x.T @ (x @ matrix), ridge=1e-12)
    torch.testing.assert_close(found, matrix, atol=1e-8, rtol=0)
    still = fit_drift(x.T @ x, x.T @ (x @ matrix), ridge=1e9)
    torch.testing.assert_close(still, torch.eye(SIZE).double(), atol=1e-6, rtol=0)


def trained(method: dict[str, Any], **sections: Any) -> tuple[Experiment, RunState]:
    experiment = build_experiment(parse({**VALUES, **sections, "method": method}))
    return experiment, run_stream(experiment, experiment.initial_state(), lambda state, event: None)


@pytest.mark.parametrize("head", ["shared", "growing"])
def test_with_a_body_that_does_not_move_it_is_linear_discriminant_analysis(head: str) -> None:
    still = {"train": {"rounds": 1, "lr": 1e-30}, "model": {"hidden": [12], "head": head}}
    _, calibrated = trained({"kind": "calibrate", "drift": "none"}, **still)
    _, reference = trained({"kind": "fedlda"}, **still)
    assert calibrated.matrix == reference.matrix


def test_with_a_body_that_does_not_move_ncm_is_the_nearest_class_mean() -> None:
    still = {"train": {"rounds": 1, "lr": 1e-30}}
    _, calibrated = trained({"kind": "calibrate", "head": "ncm", "drift": "none"}, **still)
    _, reference = trained({"kind": "fedncm"}, **still)
    assert calibrated.matrix == reference.matrix


def test_quadratic_is_the_log_density_with_half_the_shared_covariance() -> None:
    """Against scipy, on features that do not move: half a class's covariance, half the shared."""
    still = {"train": {"rounds": 1, "lr": 1e-30}}
    method = {"kind": "calibrate", "head": "quadratic", "shrinkage": 0.2, "drift": "none"}
    experiment, state = trained(method, **still)
    tasks, network = [experiment.task(number) for number in range(3)], experiment.network

    def features(x: Tensor) -> Any:
        rows = network.features(state.server.params, x, ForwardPass())
        return rows.detach().double().numpy()

    held = [torch.cat([task.partition.index(client) for client in range(4)]) for task in tasks]
    pairs = list(zip(tasks, held, strict=True))
    rows = np.concatenate([features(task.train.gather(index)) for task, index in pairs])
    labels = np.concatenate([task.train.y[index].numpy() for task, index in pairs])
    parts = {c: rows[labels == c] for c in np.unique(labels).tolist()}
    own = {c: np.cov(part.T, bias=True) for c, part in parts.items()}
    shared = sum(len(part) / len(rows) * own[c] for c, part in parts.items())
    target = 0.2 * np.trace(shared) / len(shared) * np.eye(len(shared))
    x = tasks[0].test.gather(torch.arange(20))
    found = experiment.method.predict(state.server, x, network)[:, list(parts)].numpy()
    expected = [
        multivariate_normal(part.mean(0), 0.8 * (own[c] + shared) / 2 + target).logpdf(features(x))
        + np.log(len(part) / len(rows))
        for c, part in parts.items()
    ]
    gaps = found - np.stack(expected, 1)
    np.testing.assert_allclose(gaps, np.full_like(gaps, gaps[0, 0]), atol=1e-3)


@pytest.mark.parametrize("per_class", [True, False])
def test_weights_count_as_that_many_rows(per_class: bool) -> None:
    x, y = examples(30, 6)
    weights = torch.arange(30) % 3 + 1
    found = class_sums(x, y, OUTPUTS, per_class, weights.double())
    repeated = class_sums(
        x.repeat_interleave(weights, 0), y.repeat_interleave(weights), OUTPUTS, per_class
    )
    for name, value in repeated.items():
        torch.testing.assert_close(found[name], value)


@pytest.mark.parametrize("head", ["lda", "quadratic"])
@pytest.mark.parametrize("order", ["er first", "calibrate first"])
def test_a_memory_of_everything_gives_the_statistics_of_all_examples(head: str, order: str) -> None:
    """With every example stored, Gaussians are those of all rows in the newest features."""
    er, part = {"kind": "er", "budget": 10_000}, {"kind": "calibrate", "head": head}
    method = {**er, "with": [part]} if order == "er first" else {**part, "with": [er]}
    experiment, state = trained(method)
    found = state.server.state.calibrate
    features, labels = [], []
    for number in range(3):
        task = experiment.task(number)
        rows = torch.cat([task.partition.index(client) for client in range(4)])
        x = task.train.gather(rows)
        features.append(
            experiment.network.features(state.server.params, x, ForwardPass()).detach().double()
        )
        labels.append(task.train.y[rows])
    for c in torch.unique(torch.cat(labels)).tolist():
        rows = torch.cat(features)[torch.cat(labels) == c].numpy()
        assert found.count[c] == len(rows)
        np.testing.assert_allclose(found.mean[c], rows.mean(0), atol=1e-5)
        if head == "quadratic":
            np.testing.assert_allclose(found.covariance[c], np.cov(rows.T, bias=True), atol=1e-5)


def test_a_class_without_stored_examples_keeps_its_gaussian() -> None:
    (x, y), (newer, labels) = examples(60, 7), examples(40, 8)
    old = ClassGaussians.from_sums(class_sums(x, y, OUTPUTS, per_class=True))
    present = labels != 1
    new = ClassGaussians.from_sums(
        class_sums(newer[present], labels[present], OUTPUTS + 1, per_class=True)
    )
    found = old.replaced(new)
    assert found.count.tolist() == [*old.count.tolist(), 0.0]
    torch.testing.assert_close(found.mean[1], old.mean[1])
    torch.testing.assert_close(found.covariance[1], old.covariance[1])
    torch.testing.assert_close(found.mean[2], new.mean[2])
    torch.testing.assert_close(found.covariance[2], new.covariance[2])


def test_memory_is_refused_without_a_method_that_stores_examples() -> None:
    with pytest.raises(UserError) as refusal:
        trained({"kind": "fot", "with": [{"kind": "calibrate", "drift": "memory"}]})
    assert str(refusal.value) == (
        "method.drift: must be 'none' or 'linear' without a method that stores examples (er), "
        "got 'memory'"
    )


def test_training_is_left_alone() -> None:
    _, plain = trained({"kind": "fot"})
    _, calibrated = trained({"kind": "fot", "with": [{"kind": "calibrate"}]})
    for name, value in plain.server.params.items():
        assert torch.equal(value, calibrated.server.params[name])


@pytest.mark.parametrize(
    ("method", "follows"),
    [
        ({"kind": "calibrate"}, True),
        ({"kind": "calibrate", "drift": "none"}, False),
        ({"kind": "fot", "with": [{"kind": "calibrate"}]}, False),
        ({"kind": "fot", "with": [{"kind": "calibrate", "drift": "linear"}]}, True),
        ({"kind": "er", "with": [{"kind": "calibrate"}]}, False),
        ({"kind": "er", "with": [{"kind": "calibrate", "drift": "linear"}]}, True),
    ],
)
def test_drift_is_followed_unless_a_part_keeps_features_stable(method: Any, follows: bool) -> None:
    _, state = trained(method)
    sent = [name for name in state.ledger.by_field if name.endswith("body")]
    assert bool(sent) == follows


@pytest.mark.parametrize("head", ["lda", "quadratic"])
def test_outputs_of_different_tasks_compete(head: str) -> None:
    values = {
        "data": {},
        "train": {"rounds": 5, "batch_size": 16},
        "model": {"hidden": [32], "head": "growing"},
    }
    _, plain = trained({"kind": "fot"}, **values)
    part = {"kind": "calibrate", "head": head}
    _, calibrated = trained({"kind": "fot", "with": [part]}, **values)
    before, after = (np.mean(s.matrix["task_agnostic"][-1]) for s in (plain, calibrated))
    assert after > before + 0.2


def test_secure_sums_give_the_same_answers() -> None:
    method = {"kind": "fot", "with": [{"kind": "calibrate"}]}
    _, plain = trained(method)
    _, secure = trained(method, privacy={"secagg": True})
    gaps = np.array(plain.matrix["task_aware"][-1]) - secure.matrix["task_aware"][-1]
    assert np.abs(gaps).max() < 0.05


def test_a_saved_model_predicts_with_the_refitted_head(tmp_path: Any) -> None:
    method = {"kind": "fot", "with": [{"kind": "calibrate", "head": "quadratic"}]}
    result = perdure.run({**VALUES, "method": method}, out=tmp_path / "run")
    experiment, _ = trained(method)
    task = experiment.task(2)
    rows = task.groups[0].index
    images = task.test.rows[rows].reshape(len(rows), 8, 8).numpy()
    labels = perdure.load(tmp_path / "run").predict(images)
    accuracy = float((torch.from_numpy(labels) == task.test.y[rows]).float().mean())
    assert accuracy == pytest.approx(result.matrix["task_agnostic"][2][2])


def test_it_combines_with_every_method_that_has_no_head_of_its_own() -> None:
    def has_head(kind: str) -> bool:
        method = find(kind)
        own = ("predict", "predict_from_features")
        return any(getattr(method, name) is not getattr(Method, name) for name in own)

    refused = {kind for kind in KINDS if kind != "calibrate" and refusal(kind, "calibrate")}
    assert refused == {kind for kind in KINDS if kind != "calibrate" and has_head(kind)}
    assert {"fedncm", "fedlda", "fedridge"} <= refused
    assert not refused & {"fot", "fedprotip", "stamp", "special", "pip", "er", "fedavg"}
