"""Core bases of many clients against the principal directions of their data in one place."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor

from perdure.algebra.subspaces import Subspace, covering_rank, energy_rank
from perdure.contract import CollectedUploads
from perdure.methods.parts.client_bases import (
    InputDirections,
    PooledBases,
    SequentialBases,
    SummedBases,
    input_directions,
)
from perdure.models.layers import Layer

SIZE = 60


def decaying_inputs(columns: int, seed: int = 0) -> Tensor:
    """Return inputs whose singular values fall like a power law, as those of images do."""
    generator = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(9)))[0]
    scales = torch.arange(1, SIZE + 1).float() ** -0.8
    return basis @ (scales[:, None] * torch.randn(SIZE, columns, generator=generator))


def pooled_rank(inputs: Tensor, threshold: float) -> int:
    singular = np.linalg.svd(inputs.double().numpy(), compute_uv=False)
    shares = np.cumsum(singular**2) / np.sum(singular**2)
    return int(np.searchsorted(shares, threshold) + 1)


def split(inputs: Tensor, clients: int) -> list[Tensor]:
    return list(inputs.tensor_split(clients, dim=1))


@pytest.mark.parametrize("threshold", [0.7, 0.8, 0.9, 0.95])
@pytest.mark.parametrize("clients", [2, 5, 20])
def test_the_rank_does_not_grow_with_the_number_of_clients(clients: int, threshold: float) -> None:
    inputs = decaying_inputs(800)
    none = Subspace.empty(SIZE)
    sent = [input_directions(part, none, threshold) for part in split(inputs, clients)]
    rank = PooledBases().join(sent, threshold).shape[1]
    assert abs(rank - pooled_rank(inputs, threshold)) <= max(1, 0.15 * rank)
    assert rank <= SequentialBases().join(sent, threshold).shape[1]


def test_the_union_fills_the_space_with_the_tails_of_many_clients() -> None:
    parts = [decaying_inputs(40, seed) for seed in range(20)]
    sent = [input_directions(part, Subspace.empty(SIZE), 0.95) for part in parts]
    union = torch.linalg.matrix_rank(torch.cat([client.scaled for client in sent], dim=1))
    assert union > 1.5 * PooledBases().join(sent, 0.95).shape[1]


def test_pooled_directions_cover_the_threshold_of_all_inputs() -> None:
    inputs, threshold = decaying_inputs(600), 0.9
    sent = [input_directions(part, Subspace.empty(SIZE), threshold) for part in split(inputs, 4)]
    basis = PooledBases().join(sent, threshold)
    inside = (basis.T @ inputs.double()).square().sum() / inputs.double().square().sum()
    assert threshold - 0.01 <= inside <= threshold + 0.03


@pytest.mark.parametrize("bases", [PooledBases(), SequentialBases()])
def test_protected_inputs_count_as_covered_and_are_not_sent_again(bases: PooledBases) -> None:
    inputs = decaying_inputs(400)
    left = torch.linalg.svd(inputs, full_matrices=False)[0]
    protected = Subspace.of(left[:, :12].contiguous())
    sent = [input_directions(part, protected, 0.9) for part in split(inputs, 3)]
    basis = bases.join(sent, 0.9)
    assert float((left[:, :12].T.double() @ basis).abs().max()) < 1e-5
    assert 12 + basis.shape[1] >= pooled_rank(inputs, 0.9) - 1


def test_sampled_columns_represent_all_inputs_of_a_client() -> None:
    inputs = decaying_inputs(400)
    whole = input_directions(inputs, Subspace.empty(SIZE), 0.9)
    half = input_directions(inputs[:, :200], Subspace.empty(SIZE), 0.9, weight=2.0)
    assert half.total == pytest.approx(whole.total, rel=0.1)


def test_directions_survive_the_way_to_the_server() -> None:
    sent = input_directions(decaying_inputs(50), Subspace.empty(SIZE), 0.9)
    arrived = InputDirections.read(sent.tree())
    torch.testing.assert_close(arrived.scaled, sent.scaled, atol=1e-6, rtol=1e-6)
    assert (arrived.total, arrived.outside) == (sent.total, sent.outside)


def test_the_rule_of_gpm_is_the_covering_rule_with_nothing_left_out() -> None:
    singular = torch.tensor([3.0, 2.0, 1.0])
    assert energy_rank(singular, 0.95, 20.0) == covering_rank(singular, 0.95, 20.0, 14.0)
    assert covering_rank(singular, 0.5, 20.0, 14.0) == 1  # 0.3 are covered already
    assert covering_rank(singular, 0.3, 20.0, 14.0) == 0
    assert covering_rank(singular, 0.9, 0.0, 0.0) == 0


def dealt(labels: np.ndarray[Any, Any], clients: int, alpha: float | None) -> list[Any]:
    """Return the rows of each client, evenly or by a Dirichlet distribution of each class."""
    rng = np.random.default_rng(0)
    if alpha is None:
        holder = rng.permutation(len(labels)) % clients
    else:
        chances = rng.dirichlet([alpha] * clients, 10)
        holder = np.array([rng.choice(clients, p=chances[label]) for label in labels])
    return [np.flatnonzero(holder == client) for client in range(clients) if client in holder]


@pytest.mark.parametrize("alpha", [None, 0.5])
@pytest.mark.parametrize("clients", [2, 5, 20])
@pytest.mark.parametrize("threshold", [0.8, 0.9, 0.95])
def test_ranks_of_digits_are_within_15_percent_of_pooled_data(
    threshold: float, clients: int, alpha: float | None
) -> None:
    x, y = load_digits(return_X_y=True)
    rows, none = torch.from_numpy((x - x.mean()) / x.std()).float(), Subspace.empty(64)
    parts = [rows[index].T for index in dealt(y, clients, alpha)]
    sent = [input_directions(part, none, threshold) for part in parts]
    expected = pooled_rank(rows.T, threshold)
    assert abs(PooledBases().join(sent, threshold).shape[1] - expected) <= 0.15 * expected


@pytest.mark.parametrize("threshold", [0.7, 0.95])
@pytest.mark.parametrize("largest_moment", [0, 1024], ids=["sketches", "moments"])
def test_the_threshold_of_sums_is_applied_once(threshold: float, largest_moment: int) -> None:
    """What sums of clients protect covers the threshold of all inputs, not its square."""
    x, y = load_digits(return_X_y=True)
    rows = torch.from_numpy((x - x.mean()) / x.std()).float()
    known = Subspace.of(torch.linalg.svd(rows.T, full_matrices=False)[0][:, :2].contiguous())
    total: dict[str, Tensor] = {}
    bases = SummedBases(600, largest_moment)
    for number, index in enumerate(dealt(y, 5, 0.5)):
        described = {"fc1": input_directions(rows[index].T, known, 1.0)}
        generator = torch.Generator().manual_seed(number)
        field = bases.summand(described, generator)
        total = {name: total.get(name, 0) + value for name, value in field.value.items()}
    uploads = CollectedUploads(sums={"directions": total})
    found = bases.directions(uploads, Layer("fc1", "linear", 64, 0, bias=False), threshold)
    left = known.project_out_columns(rows.T.double())
    left = left - found @ (found.T @ left)
    covered = 1 - float(left.square().sum() / rows.double().square().sum())
    assert threshold - 0.01 <= covered <= threshold + 0.04
    exact = pooled_rank(rows.T, threshold) - 2
    assert abs(found.shape[1] - exact) <= max(1, 0.15 * exact)


@pytest.mark.skipif("PERDURE_DATA" not in os.environ, reason="PERDURE_DATA names no folder")
@pytest.mark.parametrize("alpha", [None, 0.5])
@pytest.mark.parametrize("clients", [2, 5, 20])
def test_ranks_of_mnist_are_within_15_percent_of_pooled_data(
    clients: int, alpha: float | None
) -> None:
    data = np.load(Path(os.environ["PERDURE_DATA"]) / "mnist.npz")
    labels = data["y_train"][:5000]
    rows = torch.from_numpy(data["x_train"][:5000].reshape(5000, -1)).float() / 255
    rows = (rows - 0.1307) / 0.3081
    parts = [rows[index].T for index in dealt(labels, clients, alpha)]
    sent = [
        input_directions(
            part[:, :512], Subspace.empty(784), 0.9, part.shape[1] / min(512, part.shape[1])
        )
        for part in parts
    ]
    expected = pooled_rank(rows.T, 0.9)
    assert abs(PooledBases().join(sent, 0.9).shape[1] - expected) <= 0.15 * expected
