"""The Gaussian router against scipy's densities, and FedProTIP with it and with pooled bases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import logsumexp
from scipy.stats import multivariate_normal
from sklearn.datasets import load_digits

import perdure
from perdure.config import parse
from perdure.contract.method import NO_TASK, best_tasks
from perdure.core.errors import UserError
from perdure.methods.parts.closed_form import ClassGaussians
from perdure.methods.parts.gaussian_router import (
    class_tails,
    hidden_names,
    joined_features,
    joint_scores,
    router_features,
    task_log_densities,
    task_scores,
)
from perdure.models.network import Outputs
from perdure.training.experiment import build_experiment
from perdure.training.loop import run_stream
from perdure.training.state import RunState

VALUES: dict[str, Any] = {
    "stream": {"kind": "split", "tasks": 3, "classes_per_task": 2},
    "clients": {"count": 4, "partition": {"kind": "dirichlet", "alpha": 1.0}},
    "model": {"hidden": [32, 16]},
    "train": {"rounds": 4, "batch_size": 16},
    "engine": {"kind": "serial"},
}


def trained(**options: Any) -> RunState:
    method = {"kind": "fedprotip", "threshold": 0.8, "bases": "pooled", **options}
    experiment = build_experiment(parse({**VALUES, "method": method}))
    return run_stream(experiment, experiment.initial_state(), lambda state, event: None)


def some_classes() -> ClassGaussians:
    """Four classes in three dimensions."""
    generator = torch.Generator().manual_seed(0)
    mean = 3 * torch.randn(4, 3, generator=generator).double()
    roots = torch.randn(4, 3, 3, generator=generator).double()
    covariance = roots @ roots.transpose(1, 2) + torch.eye(3).double()
    return ClassGaussians(torch.tensor([10.0, 20.0, 30.0, 40.0]).double(), mean, covariance)


def by_numpy(classes: ClassGaussians, shrinkage: float = 0.1) -> list[np.ndarray[Any, Any]]:
    """Half a class's own covariance and half the shared one, a tenth of it the mean variance."""
    own = classes.covariance.numpy()
    shared = np.tensordot(classes.count.numpy() / 100, own, 1)
    target = shrinkage * np.trace(shared) / 3 * np.eye(3)
    return [(1 - shrinkage) * (c + shared) / 2 + target for c in own]


@pytest.mark.parametrize("kind", ["growing", "shared"])
def test_a_tasks_density_is_the_mixture_of_its_classes(kind: Any) -> None:
    classes, outputs = some_classes(), Outputs(kind, 4, ((0, 2), (1, 3)))
    rows = torch.randn(5, 3, generator=torch.Generator().manual_seed(1)).double()
    found, priors = task_log_densities(rows, classes, outputs)
    logs = [
        multivariate_normal(m.numpy(), c).logpdf(rows.numpy())
        for m, c in zip(classes.mean, by_numpy(classes), strict=True)
    ]
    shares = np.log([10 / 30, 20 / 30, 30 / 70, 40 / 70])
    weighted = np.stack(logs, 1) + shares
    expected = np.stack([logsumexp(weighted[:, :2], 1), logsumexp(weighted[:, 2:], 1)], 1)
    gaps = found.numpy() - expected
    np.testing.assert_allclose(gaps, np.broadcast_to(gaps[0, 0], gaps.shape), atol=1e-9)
    np.testing.assert_allclose(priors, np.log([0.3, 0.7]))


def test_rows_decide_alone_or_batch_by_batch() -> None:
    densities = torch.tensor([[0.0, -1.0], [0.0, -1.0], [-5.0, 0.0], [0.0, -2.0]])
    even = torch.zeros(2)
    assert joint_scores(densities, even).argmax(1).tolist() == [0, 0, 1, 0]
    assert joint_scores(densities, even, batch=2).argmax(1).tolist() == [0, 0, 1, 1]


def test_the_size_of_a_task_counts_once_per_decision() -> None:
    densities = torch.tensor([[-0.5, 0.0]] * 4)  # each row is a little more like the small task
    large_first = torch.tensor([0.9, 0.1]).log()
    assert joint_scores(densities, large_first).argmax(1).tolist() == [0] * 4
    assert joint_scores(densities, large_first, batch=4).argmax(1).tolist() == [0] * 4
    assert joint_scores(2 * densities, large_first, batch=4).argmax(1).tolist() == [1] * 4


def test_the_tail_is_the_share_of_a_class_that_lies_farther_away() -> None:
    """Against draws of the class: of ten thousand, so many lie farther from the mean."""
    classes = some_classes()
    rng = np.random.default_rng(0)
    for number, metric in enumerate(by_numpy(classes)):
        mean, fitted = classes.mean[number].numpy(), by_numpy(classes, 0.0)[number]
        draws = rng.multivariate_normal(mean, fitted, 10_000)
        distances = np.einsum("ni,ij,nj->n", draws - mean, np.linalg.inv(metric), draws - mean)
        found = class_tails(torch.tensor(draws[:100]), classes)[:, number].numpy()
        expected = [(distances > d).mean() for d in distances[:100]]
        np.testing.assert_allclose(found, expected, atol=0.05)


def test_rows_of_no_known_task() -> None:
    classes, outputs = some_classes(), Outputs("growing", 4, ((0, 2), (1, 3)))
    near, far = classes.mean[0], torch.full((3,), 100.0).double()
    rows = torch.stack([near, far, near, near, far, far])
    found = best_tasks(task_scores(rows, classes.tree(), outputs, unknown=1e-4))
    assert found.tolist() == [0, NO_TASK, 0, 0, NO_TASK, NO_TASK]
    assert NO_TASK not in best_tasks(task_scores(rows, classes.tree(), outputs))
    batches = best_tasks(task_scores(rows, classes.tree(), outputs, batch=3, unknown=1e-4))
    assert batches[3:].tolist() == [NO_TASK] * 3  # two of three
    assert NO_TASK not in batches[:3]  # one of three


def test_hidden_layers_stand_beside_the_final_features() -> None:
    experiment = build_experiment(parse({**VALUES, "model": {"hidden": [7, 6, 5]}}))
    network = experiment.network
    assert [hidden_names(network, n) for n in (1, 2, 3, 9)] == [
        [], ["fc3.weight"], ["fc2.weight", "fc3.weight"], ["fc2.weight", "fc3.weight"],
    ]  # fmt: skip
    features, channels = torch.ones(2, 3), torch.arange(16.0).reshape(2, 2, 2, 2)
    tokens = torch.arange(12.0).reshape(2, 3, 2)
    joined = joined_features(features, {"a": channels, "b": tokens}, ["a", "b"])
    assert joined[0].tolist() == [1.5, 5.5, 2.0, 3.0, 1.0, 1.0, 1.0]


def test_what_clients_send_are_the_gaussians_of_all_their_rows() -> None:
    state = trained(router="gaussian", router_layers=2)
    options = {"kind": "fedprotip", "router": "gaussian"}
    experiment = build_experiment(parse({**VALUES, "method": options}))
    task = experiment.task(2)
    rows = torch.cat([task.partition.index(client) for client in range(4)])
    features = router_features(state.server, task.train.gather(rows), experiment.network, 2)
    assert len(state.server.state.gaussians["count"]) == 6
    for number, label in enumerate(task.classes):
        of_class = features[task.train.y[rows] == label].numpy()
        found = {n: v[4 + number].numpy() for n, v in state.server.state.gaussians.items()}
        assert found["count"] == len(of_class)
        np.testing.assert_allclose(found["mean"], of_class.mean(0), atol=1e-5)
        np.testing.assert_allclose(found["covariance"], np.cov(of_class.T, bias=True), atol=1e-4)


def test_a_batch_is_routed_as_well_as_if_its_task_were_known() -> None:
    state = trained(router="gaussian", routing="batch")
    routed, aware = state.matrix["routed"][-1], state.matrix["task_aware"][-1]
    assert np.mean(aware) - np.mean(routed) < 0.02  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("stream", "head", "reported"),
    [("permuted", "shared", False), ("permuted", "growing", True), ("split", "shared", True)],
)
def test_routed_accuracy_is_reported_where_a_task_restricts_the_outputs(
    stream: str, head: str, reported: bool
) -> None:
    values = {
        **VALUES,
        "data": {"limit": 200},
        "stream": {"kind": stream, "tasks": 2},
        "model": {"hidden": [32], "head": head},
        "method": {"kind": "fedprotip", "router": "gaussian", "routing": "batch"},
        "runs": {"evaluate_every": 2},
    }
    result = perdure.run(values).values
    assert (result["matrix"]["routed"] is not None) == reported
    assert (result["metrics"]["routed"] is not None) == reported
    assert result["routing"][0][0] == 1.0  # tasks are predicted in any case
    assert np.mean(result["routing"][1]) > 0.6


def test_a_trained_model_says_what_is_of_no_known_task(tmp_path: Path) -> None:
    method = {"kind": "fedprotip", "bases": "pooled", "threshold": 0.8, "router": "gaussian"}
    perdure.run({**VALUES, "method": {**method, "unknown": 1e-3}}, out=tmp_path / "run")
    model = perdure.load(tmp_path / "run")
    images, labels = load_digits(return_X_y=True)
    of_task = np.isin(labels, model.network.outputs.task_classes[2])
    known = (images[of_task] * 255 / 16).round().astype(np.uint8).reshape(-1, 8, 8)
    noise = np.random.default_rng(0).choice([0, 255], (50, 8, 8)).astype(np.uint8)
    assert (model.predict_tasks(known) == 2).mean() > 0.8
    assert (model.predict_tasks(noise) == -1).mean() > 0.6
    assert len(model.predict(noise)) == 50
    assert model.predict_tasks(noise[:0]).tolist() == []


def test_a_model_that_cannot_route_predicts_no_task(tmp_path: Path) -> None:
    perdure.run({**VALUES, "method": {"kind": "fedavg"}}, out=tmp_path / "run")
    assert perdure.load(tmp_path / "run").predict_tasks(np.zeros((2, 8, 8), np.uint8)) is None


def test_the_gaussian_router_needs_sums_alone() -> None:
    state = trained(router="gaussian", transport="sketch")
    assert set(state.ledger.types.values()) == {"Sum"}
    assert "references" not in state.ledger.types


def test_sums_give_the_spaces_that_each_clients_directions_give() -> None:
    shown, summed = trained(), trained(transport="sketch")
    for name, tree in shown.server.state.spaces.items():
        ranks = [next(iter(t.values())).shape[1] for t in (tree, summed.server.state.spaces[name])]
        assert abs(ranks[0] - ranks[1]) <= 2


def test_pooled_bases_protect_less_than_the_union() -> None:
    def protected(**options: Any) -> int:
        spaces = trained(**options).server.state.spaces
        first = spaces["fc1.weight"]
        size = next(iter(first.values())).shape[1]
        return size if "basis" in first else 64 - size

    assert protected(threshold=0.95) < protected(threshold=0.95, bases="union")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rank_rule": "mass"}, "method.bases: must be union with method.rank_rule mass"),
        ({"bases": "sequential", "transport": "sketch"}, "method.bases: must be union or pooled"),
    ],
)
def test_pairs_that_do_not_exist_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        trained(**options)
