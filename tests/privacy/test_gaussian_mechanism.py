"""Clipping, and the noise of the Gaussian mechanism."""

from __future__ import annotations

import torch

from perdure.privacy.accounting import clip_norm, fot_sigma, gaussian_sigma


def test_clipping_scales_long_matrices_down_and_leaves_short_ones_alone() -> None:
    matrix = torch.full((2, 2), 3.0)
    assert float(clip_norm(matrix, 1.5).norm()) == 1.5
    assert torch.equal(clip_norm(matrix, 100.0), matrix)
    assert torch.equal(clip_norm(torch.zeros(2), 1.0), torch.zeros(2))


def test_sigma_matches_the_printed_and_the_standard_formula() -> None:
    """For 50 clients, epsilon 5 and delta 1e-5: 0.097 as printed, 0.137 by the standard form."""
    assert round(fot_sigma(5, 1e-5, 50), 3) == 0.097
    assert round(gaussian_sigma(5, 1e-5, 50, 1.0), 3) == 0.137
    assert gaussian_sigma(5, 1e-5, 50, 2.0) == 2 * gaussian_sigma(5, 1e-5, 50, 1.0)
