"""Gaussian sketches and the noise on them."""

from __future__ import annotations

import numpy as np
import torch

from perdure.algebra.sketches import clip_norm, gaussian_sketch, paper_sigma, standard_sigma


def test_sketch_has_the_second_moment_of_its_columns() -> None:
    rng = np.random.default_rng(0)
    columns = rng.normal(size=(4, 30)) * np.array([[4], [2], [1], [0]])
    generator = torch.Generator().manual_seed(0)
    size = 40_000
    sketch = gaussian_sketch(torch.tensor(columns), size, generator).numpy()
    assert sketch.shape == (4, size)
    np.testing.assert_allclose(sketch @ sketch.T / size, columns @ columns.T, rtol=0.05, atol=5)


def test_sums_of_sketches_find_the_principal_space() -> None:
    """What clients' sketches span together is what their data spans together, near enough."""
    rng = np.random.default_rng(1)
    generator = torch.Generator().manual_seed(1)
    parts = [rng.normal(size=(10, 3)) @ rng.normal(size=(3, 50)) for _ in range(2)]
    total = sum(gaussian_sketch(torch.tensor(part), 50, generator) for part in parts)
    left = np.linalg.svd(total.numpy())[0][:, :6]
    data = np.concatenate(parts, axis=1)
    assert np.linalg.norm(data - left @ left.T @ data) < 1e-9 * np.linalg.norm(data)


def test_clipping() -> None:
    matrix = torch.full((2, 2), 3.0)
    assert float(clip_norm(matrix, 1.5).norm()) == 1.5
    assert torch.equal(clip_norm(matrix, 100.0), matrix)
    assert torch.equal(clip_norm(torch.zeros(2), 1.0), torch.zeros(2))


def test_noise_as_in_the_notes() -> None:
    """For 50 clients, epsilon 5 and delta 1e-5: 0.097 as printed, 0.137 by the standard form."""
    assert round(paper_sigma(5, 1e-5, 50), 3) == 0.097
    assert round(standard_sigma(5, 1e-5, 50, 1.0), 3) == 0.137
    assert standard_sigma(5, 1e-5, 50, 2.0) == 2 * standard_sigma(5, 1e-5, 50, 1.0)
