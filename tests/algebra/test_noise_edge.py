"""Singular values of noise: where they end, and what they leave of a signal."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from perdure.algebra.sketches import noise_edge, signal_energy, signal_values


@pytest.mark.parametrize(
    ("rows", "columns", "margin"), [(8, 8, 1.5), (64, 64, 1.15), (20, 200, 1.15), (1, 30, 1.8)]
)
def test_noise_alone_is_below_the_edge(rows: int, columns: int, margin: float) -> None:
    generator = np.random.default_rng(0)
    draws = generator.normal(size=(400, rows, columns)) * 2.5
    largest = np.linalg.norm(draws, ord=2, axis=(1, 2))
    edge = noise_edge(rows, columns, 2.5)
    assert (largest > edge).mean() <= 0.01
    assert edge < margin * largest.mean()
    assert edge > 2.5 * (math.sqrt(rows) + math.sqrt(columns))


def test_the_margin_vanishes_for_large_matrices() -> None:
    ends = 2 * math.sqrt(10**6)
    assert 1 < noise_edge(10**6, 10**6, 1.0) / ends < 1.001


def test_a_signal_above_the_edge_is_found_with_its_size() -> None:
    generator, rows, columns, sigma = np.random.default_rng(1), 150, 200, 0.3
    left = np.linalg.qr(generator.normal(size=(rows, 3)))[0]
    right = np.linalg.qr(generator.normal(size=(columns, 3)))[0]
    sizes = np.array([40.0, 25.0, 12.0])
    noisy = (left * sizes) @ right.T + sigma * generator.normal(size=(rows, columns))
    singular = torch.linalg.svdvals(torch.from_numpy(noisy))
    found = signal_values(singular, rows, columns, sigma)
    assert int((found > 0).sum()) == 3
    assert found[:3].tolist() == pytest.approx(sizes, rel=0.03)
    energy = signal_energy(singular, rows, columns, sigma)
    assert energy == pytest.approx((sizes**2).sum(), rel=0.05)


def test_of_noise_alone_nothing_is_left() -> None:
    noise = torch.from_numpy(np.random.default_rng(2).normal(size=(64, 64)))
    assert not signal_values(torch.linalg.svdvals(noise), 64, 64, 1.0).any()


def test_without_noise_nothing_changes() -> None:
    singular = torch.tensor([3.0, 2.0, 0.0])
    assert signal_values(singular, 3, 3, 0.0) is singular
    assert signal_energy(singular, 3, 3, 0.0) == 13.0
    assert len(signal_values(singular[:0], 3, 3, 1.0)) == 0
