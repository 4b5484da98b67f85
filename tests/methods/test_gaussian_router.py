"""The Gaussian router against scipy's densities, and FedProTIP with it and with pooled bases."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import logsumexp
from scipy.stats import multivariate_normal

from perdure.config import parse
from perdure.core.errors import UserError
from perdure.methods.parts.class_gaussians import ClassGaussians
from perdure.methods.parts.gaussian_router import likeliest_task, task_log_densities
from perdure.models.outputs import Outputs
from perdure.training.experiment import build_experiment
from perdure.training.loop import run_stream
from perdure.training.state import RunState

VALUES: dict[str, Any] = {
    "stream": {"kind": "split", "tasks": 3, "classes_per_task": 2},
    "clients": {"count": 4, "partition": {"kind": "dirichlet", "alpha": 1.0}},
    "model": {"hidden": [32]},
    "train": {"rounds": 4, "batch_size": 16},
    "engine": {"kind": "serial"},
}


def trained(**options: Any) -> RunState:
    method = {"kind": "fedprotip", "threshold": 0.8, "bases": "pooled", **options}
    experiment = build_experiment(parse({**VALUES, "method": method}))
    return run_stream(experiment, experiment.initial_state(), lambda state, event: None)


def test_a_tasks_density_is_the_mixture_of_its_classes() -> None:
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(4, 3, generator=generator).double()
    roots = torch.randn(4, 3, 3, generator=generator).double()
    covariance = roots @ roots.transpose(1, 2) + torch.eye(3).double()
    count = torch.tensor([10.0, 20.0, 30.0, 40.0]).double()
    outputs = Outputs("growing", 4, ((0, 2), (1, 3)))
    rows = torch.randn(5, 3, generator=generator)
    found = task_log_densities(rows, ClassGaussians(count, mean, covariance).tree(), outputs)
    shared = np.tensordot(count.numpy() / 100, covariance.numpy(), 1)
    logs = []
    for c in range(4):
        half = (covariance[c].numpy() + shared) / 2
        shrunk = 0.9 * half + 0.1 * np.trace(half) / 3 * np.eye(3)
        logs.append(multivariate_normal(mean[c].numpy(), shrunk).logpdf(rows.numpy()))
    weighted = np.stack(logs, 1) + np.log(count.numpy() / 100)
    expected = np.stack([logsumexp(weighted[:, :2], 1), logsumexp(weighted[:, 2:], 1)], 1)
    gaps = found.numpy() - expected
    np.testing.assert_allclose(gaps, np.broadcast_to(gaps[0, 0], gaps.shape), atol=1e-9)


def test_rows_decide_alone_or_batch_by_batch() -> None:
    densities = torch.tensor([[0.0, -1.0], [0.0, -1.0], [-5.0, 0.0], [0.0, -2.0]])
    assert likeliest_task(densities).tolist() == [0, 0, 1, 0]
    assert likeliest_task(densities, batch=2).tolist() == [0, 0, 1, 1]


def test_a_batch_is_routed_as_well_as_if_its_task_were_known() -> None:
    state = trained(router="gaussian", routing="batch")
    routed, aware = state.matrix["routed"][-1], state.matrix["task_aware"][-1]
    assert np.mean(aware) - np.mean(routed) < 0.02  # type: ignore[arg-type]


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
