"""Gaussian sketches."""

from __future__ import annotations

import numpy as np
import torch

from perdure.algebra.sketches import gaussian_sketch


def test_a_sketch_has_the_second_moment_of_its_columns() -> None:
    rng = np.random.default_rng(0)
    columns = rng.normal(size=(4, 30)) * np.array([[4], [2], [1], [0]])
    generator = torch.Generator().manual_seed(0)
    size = 40_000
    sketch = gaussian_sketch(torch.tensor(columns), size, generator).numpy()
    assert sketch.shape == (4, size)
    np.testing.assert_allclose(sketch @ sketch.T / size, columns @ columns.T, rtol=0.05, atol=5)


def test_sums_of_sketches_find_the_principal_space() -> None:
    """Clients' sketches together span what their data spans together, up to rounding."""
    rng = np.random.default_rng(1)
    generator = torch.Generator().manual_seed(1)
    parts = [rng.normal(size=(10, 3)) @ rng.normal(size=(3, 50)) for _ in range(2)]
    total = sum(gaussian_sketch(torch.tensor(part), 50, generator) for part in parts)
    left = np.linalg.svd(total.numpy())[0][:, :6]
    data = np.concatenate(parts, axis=1)
    assert np.linalg.norm(data - left @ left.T @ data) < 1e-9 * np.linalg.norm(data)
