"""Subspaces against numpy and scipy."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given
from hypothesis import strategies as st

from perdure.algebra.subspaces import (
    Subspace,
    complement,
    extend_basis,
    new_directions,
    principal_directions,
    project_out,
    project_out_columns,
    projector,
)


def random_basis(size: int, rank: int, seed: int = 0) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    return torch.tensor(np.linalg.qr(rng.normal(size=(size, rank)))[0], dtype=torch.float32)


def onto(columns: torch.Tensor) -> np.ndarray:
    """Return the orthogonal projector on a column space, by scipy's orthonormal basis."""
    basis = scipy.linalg.orth(columns.double().numpy(), rcond=1e-5)
    return basis @ basis.T


def angles(a: torch.Tensor, b: torch.Tensor) -> np.ndarray:
    return scipy.linalg.subspace_angles(a.double().numpy(), b.double().numpy())


def test_projections_equal_those_of_numpy() -> None:
    basis = random_basis(7, 3)
    matrix = torch.tensor(np.random.default_rng(1).normal(size=(4, 7)), dtype=torch.float32)
    inside = onto(basis)
    expected = matrix.double().numpy() @ (np.eye(7) - inside)
    np.testing.assert_allclose(project_out(matrix, {"basis": basis}).numpy(), expected, atol=1e-6)
    np.testing.assert_allclose(
        project_out(matrix, {"free": basis}).numpy(), matrix.double().numpy() @ inside, atol=1e-6
    )
    np.testing.assert_allclose(project_out_columns(matrix.T, basis).numpy(), expected.T, atol=1e-6)


def test_the_complement_equals_the_null_space_of_scipy() -> None:
    basis = random_basis(9, 4)
    null = torch.tensor(scipy.linalg.null_space(basis.double().numpy().T))
    assert complement(basis).shape == (9, 5)
    assert angles(complement(basis), null).max() < 1e-5


def test_principal_directions_equal_the_svd_of_numpy_for_tall_and_wide_matrices() -> None:
    rng = np.random.default_rng(2)
    for shape in ((6, 4), (6, 40)):
        matrix = rng.normal(size=shape)
        left, values, _ = np.linalg.svd(matrix, full_matrices=False)
        ours, singular = principal_directions(torch.tensor(matrix))
        np.testing.assert_allclose(singular.numpy(), values, rtol=1e-7)
        np.testing.assert_allclose(np.abs((ours.numpy() * left).sum(0)), 1.0, rtol=1e-7)


def test_dependent_columns_add_no_direction() -> None:
    five = random_basis(8, 5)
    dependent = torch.cat([five[:, :3], five[:, :2] + five[:, 2:3], five[:, 1:2] * 3], dim=1)
    extended = extend_basis(five, dependent)
    assert extended.shape == (8, 5)  # plain QR of [five, dependent] gives 8
    assert new_directions(torch.zeros(8, 2)).shape == (8, 0)
    assert new_directions(torch.zeros(8, 0)).shape == (8, 0)


@given(
    st.integers(2, 12),
    st.integers(0, 12),
    st.integers(0, 20),
    st.integers(1, 6),
    st.integers(0, 99),
)
def test_extension_spans_the_sum(size: int, rank: int, count: int, within: int, seed: int) -> None:
    """Candidates of a low rank: the span is scipy's of all columns, whatever their order."""
    rng = np.random.default_rng(seed)
    basis = random_basis(size, min(rank, size), seed)
    low = rng.normal(size=(size, within)) @ rng.normal(size=(within, count))
    candidates = torch.tensor(low, dtype=torch.float32)
    ours = extend_basis(basis, candidates)
    expected = onto(torch.cat([basis, candidates], dim=1))
    assert ours.shape[1] == round(np.trace(expected)) <= size
    np.testing.assert_allclose((ours @ ours.T).numpy(), expected, atol=2e-4)
    np.testing.assert_allclose((ours.T @ ours).numpy(), np.eye(ours.shape[1]), atol=1e-5)
    shuffled = extend_basis(basis, candidates[:, torch.randperm(count)])
    np.testing.assert_allclose((shuffled @ shuffled.T).numpy(), expected, atol=2e-4)


@given(st.integers(1, 10), st.lists(st.integers(0, 4), max_size=5), st.integers(0, 99))
def test_a_subspace_projects_like_a_plain_basis(size: int, steps: list[int], seed: int) -> None:
    """Whichever basis is stored, extending step by step gives the span of all columns."""
    rng = np.random.default_rng(seed)
    space, basis = Subspace.empty(size), torch.zeros(size, 0)
    matrix = torch.tensor(rng.normal(size=(3, size)), dtype=torch.float32)
    for count in steps:
        candidates = torch.tensor(rng.normal(size=(size, count)), dtype=torch.float32)
        wider, new = space.extended(candidates)
        assert wider.rank - space.rank == new.shape[1]
        space, basis = wider, extend_basis(basis, candidates)
    assert space.rank == basis.shape[1]
    assert space.size == size
    assert next(iter(space.tree().values())).shape[1] <= size // 2 or 2 * space.rank <= size
    expected = project_out(matrix, {"basis": basis})
    torch.testing.assert_close(space.project_out_rows(matrix), expected, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(
        space.project_out_columns(matrix.T), expected.T, atol=2e-5, rtol=1e-4
    )
    again = Subspace.from_tree(space.tree())
    torch.testing.assert_close(again.project_out_rows(matrix), space.project_out_rows(matrix))


def test_a_small_complement_keeps_its_precision() -> None:
    """With one direction of 200 left, a projection still has no component in the subspace."""
    basis = random_basis(200, 199)
    step = Subspace.of(basis).project_out_rows(torch.randn(10, 200) + 100)
    inside = (step.double() @ basis.double()).norm() / step.double().norm()
    assert inside < 1e-6
    full = Subspace.of(random_basis(5, 5))
    assert torch.equal(full.project_out_rows(torch.ones(2, 5)), torch.zeros(2, 5))


@pytest.mark.parametrize("rank", [1, 3, 4, 5, 7, 8])
def test_the_projector_gives_the_same_projection(rank: int) -> None:
    basis = random_basis(8, rank)
    tree, matrix = Subspace.of(basis).tree(), torch.randn(3, 8)
    ready = projector(tree)
    assert ("projector" in ready) == (min(rank, 8 - rank) >= 2)
    expected = matrix.double().numpy() @ (np.eye(8) - basis.double().numpy() @ basis.numpy().T)
    np.testing.assert_allclose(project_out(matrix, ready), expected, atol=1e-5)
    np.testing.assert_allclose(project_out(matrix, tree), expected, atol=1e-5)


@pytest.mark.parametrize("rank", [2, 6])
def test_projection_runs_under_vmap_with_one_space(rank: int) -> None:
    space = Subspace.of(random_basis(8, rank))
    stack = torch.randn(5, 3, 8)
    expected = torch.stack([space.project_out_rows(matrix) for matrix in stack])
    torch.testing.assert_close(torch.vmap(space.project_out_rows)(stack), expected)
