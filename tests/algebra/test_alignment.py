"""Gradient alignment against scipy, against torch's optimizer, and in corner cases."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from perdure.algebra.alignment import (
    Alignment,
    SearchSettings,
    align,
    align_models,
    cosines,
    minimize_on_face,
    optimality_gap,
    published_search,
    solve_exactly,
)

PLAIN = Alignment(kappa=0.5, normalize="none", scale="paper")


def value(g, gamma, kappa):
    """Eq. 2's objective, from the vectors themselves."""
    mean, mixed = g.mean(0), gamma @ g
    return mixed @ mean + kappa * np.linalg.norm(mean) * np.linalg.norm(mixed)


def random_directions(rng):
    n, d = int(rng.integers(2, 9)), int(rng.choice([2, 4, 20, 200]))
    spread = np.exp(rng.normal(size=(n, 1)) * rng.choice([0.0, 1.0]))
    g = rng.normal(size=(n, d)) * spread + rng.normal(size=d) * rng.choice([0, 0.3, 1.0])
    return g / np.sqrt((g**2).sum(1).mean()), float(rng.choice([0.1, 0.25, 0.5, 0.9]))


def test_the_exact_solver_is_never_worse_than_scipy_on_1000_instances():
    rng, worst = np.random.default_rng(0), -np.inf
    for _ in range(1000):
        g, kappa = random_directions(rng)
        n = len(g)
        ours = value(g, solve_exactly(g @ g.T, kappa), kappa)
        gram, mean = g @ g.T, (g @ g.T).mean(1)
        c = kappa * np.sqrt(mean.mean())

        def f(x, gram=gram, mean=mean, c=c):
            pull = gram @ x
            norm = np.sqrt(max(x @ pull, 1e-30))
            return mean @ x + c * norm, mean + c * pull / norm

        computed = minimize(
            f, np.full(n, 1 / n), jac=True, bounds=[(0, 1)] * n, method="SLSQP",
            constraints={"type": "eq", "fun": lambda x: x.sum() - 1, "jac": np.ones_like},
            options={"ftol": 1e-15, "maxiter": 300},
        )  # fmt: skip
        other = np.clip(computed.x, 0, None)
        theirs = value(g, other / other.sum(), kappa)
        # the scale of the objective's terms, for minima that are themselves zero
        worst = max(worst, (ours - theirs) / max(abs(theirs), 1e-3 * c))
    assert worst <= 1e-6


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 10**6))
def test_gamma_is_in_the_simplex_and_no_vertex_or_mean_is_better(n, d, seed):
    g = np.random.default_rng(seed).normal(size=(n, d))
    g /= np.sqrt((g**2).sum(1).mean())
    gamma = solve_exactly(g @ g.T, 0.5)
    assert gamma.min() >= 0
    assert gamma.sum() == pytest.approx(1)
    for other in (*np.eye(n), np.full(n, 1 / n)):
        assert value(g, gamma, 0.5) <= value(g, other, 0.5) + 1e-7


def reference(g, kappa, search):
    """The authors' search with torch's own softmax, autograd, SGD and StepLR; all relative."""
    g = torch.tensor(g)
    gram = g @ g.T / g.norm(dim=1).mean() ** 2
    mean = gram.mean(1)
    c = kappa * (mean.mean() + 1e-4).sqrt()
    w = torch.zeros(len(g), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=search.lr, momentum=search.momentum)
    every = search.halve_every or 10**9
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, every, 0.5)
    best, lowest = None, np.inf
    for step in range(search.steps + 1):
        gamma = w.softmax(0)
        loss = gamma @ mean + c * (gamma @ gram @ gamma + 1e-4).sqrt()
        if loss.item() < lowest:
            best, lowest = gamma.detach(), loss.item()
        if step < search.steps:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return best.numpy()


@pytest.mark.parametrize(
    "search",
    [
        SearchSettings(),
        SearchSettings(momentum=0.1, steps=25),
        SearchSettings(steps=20, halve_every=None),
    ],
)
def test_published_search_is_sgd_on_a_softmax(search):
    rng = np.random.default_rng(1)
    for n in (2, 5, 10):
        g = rng.normal(size=(n, 30))
        np.testing.assert_allclose(
            published_search(g @ g.T, 0.5, search), reference(g, 0.5, search), atol=1e-9
        )


def test_published_search_does_not_depend_on_the_scale():
    g = np.random.default_rng(2).normal(size=(4, 9))
    small = 1e-5 * g
    np.testing.assert_allclose(
        published_search(g @ g.T, 0.5, SearchSettings()),
        published_search(small @ small.T, 0.5, SearchSettings()),
        rtol=1e-6,
    )


def by_hand(g, kappa):
    """Eq. 2 from the vectors, with scipy's Gamma."""
    n = len(g)
    bounds = {"bounds": [(0, 1)] * n, "method": "SLSQP", "options": {"ftol": 1e-14}}
    sum_to_one = {"type": "eq", "fun": lambda x: x.sum() - 1}
    gamma = minimize(
        lambda x: value(g, x, kappa), np.full(n, 1 / n), constraints=sum_to_one, **bounds
    ).x
    mixed = gamma @ g
    return g.mean(0) + kappa * np.linalg.norm(g.mean(0)) * mixed / np.linalg.norm(mixed)


def test_coefficients_give_equation_2():
    rng = np.random.default_rng(3)
    for _ in range(20):
        g = rng.normal(size=(4, 40)) + 0.3 * rng.normal(size=40)
        np.testing.assert_allclose(PLAIN.coefficients(g @ g.T) @ g, by_hand(g, 0.5), atol=2e-4)


def test_normalization_scales_directions_and_a_scale_divides_the_result():
    g = np.random.default_rng(4).normal(size=(3, 20)) * np.array([[1.0], [10.0], [0.1]])
    norms = np.linalg.norm(g, axis=1, keepdims=True)
    equal = g / norms * norms.mean()
    for expected, same in (("mean", equal), ("last", g / norms * norms[-1])):
        ours = Alignment(0.5, expected, "paper").coefficients(g @ g.T) @ g
        np.testing.assert_allclose(ours, PLAIN.coefficients(same @ same.T) @ same, rtol=1e-6)
    for scale, divisor in (("published", 1.25), ("unit", 1.5)):
        ours = Alignment(0.5, "none", scale).coefficients(g @ g.T)
        np.testing.assert_allclose(ours * divisor, PLAIN.coefficients(g @ g.T))


def test_coefficients_do_not_depend_on_scale_or_sign():
    g = np.random.default_rng(5).normal(size=(5, 7))
    once = PLAIN.coefficients(g @ g.T)
    for factor in (-1.0, 1e-6, 1e6):
        np.testing.assert_allclose(PLAIN.coefficients(factor**2 * (g @ g.T)), once, rtol=1e-5)


@pytest.mark.parametrize("solver", ["exact", "published"])
def test_equal_opposite_zero_and_infinite_directions_have_defined_results(solver):
    alignment = Alignment(0.5, "none", "paper", solver)

    def aligned(g):
        g = np.array(g, float)
        return alignment.coefficients(g @ g.T) @ np.nan_to_num(g)

    np.testing.assert_allclose(aligned([[3, 4]]), [4.5, 6])  # one client: (1 + kappa) g
    np.testing.assert_allclose(aligned([[3, 4]] * 3), [4.5, 6])  # equal gradients
    np.testing.assert_allclose(aligned([[0, 0]] * 3), [0, 0])  # no client moved
    np.testing.assert_allclose(aligned([[1, 2], [-1, -2]]), [0, 0], atol=1e-7)  # they cancel out
    assert np.isfinite(aligned([[0, 0], [2, 0]])).all()
    np.testing.assert_allclose(aligned([[np.nan, 1], [3, 4]]), [4.5, 6])
    np.testing.assert_allclose(aligned([[np.inf, 1], [3, 4]]), [4.5, 6])
    np.testing.assert_allclose(aligned([[np.nan, 1], [np.inf, 1]]), [0, 0])


def test_a_zero_direction_counts_in_the_mean():
    # Gamma can put all its weight on it, so that only the mean is left
    g = np.array([[0.0, 0.0], [2.0, 0.0]])
    np.testing.assert_allclose(PLAIN.coefficients(g @ g.T) @ g, [1, 0], atol=1e-7)


def test_kappa_0_is_the_mean():
    g = np.random.default_rng(6).normal(size=(4, 5))
    mean = Alignment(0.0, "none").coefficients(g @ g.T) @ g
    np.testing.assert_allclose(mean, g.mean(0))


def test_stacked_problems_have_the_solutions_of_the_single_ones():
    g = np.random.default_rng(7).normal(size=(2, 3, 4, 6))
    together = PLAIN.coefficients(g @ np.swapaxes(g, -1, -2))
    for i in range(2):
        for j in range(3):
            np.testing.assert_allclose(together[i, j], PLAIN.coefficients(g[i, j] @ g[i, j].T))


def models(count=3):
    generator = torch.Generator().manual_seed(0)
    return [
        {"w": torch.randn(4, 5, generator=generator), "b": torch.randn(4, generator=generator)}
        for _ in range(count)
    ]


def test_models_are_aligned_as_one_long_vector():
    computed = models()
    flat = np.stack([np.concatenate([m["w"].flatten(), m["b"]]) for m in computed]).astype(float)
    expected = Alignment().coefficients(flat @ flat.T) @ flat
    aligned = align_models(computed, Alignment())
    np.testing.assert_allclose(aligned["w"].flatten(), expected[:20], atol=1e-5)
    np.testing.assert_allclose(aligned["b"], expected[20:], atol=1e-5)


def test_layer_scope_aligns_every_tensor_separately():
    computed = models()
    aligned = align_models(computed, Alignment(scope="layer"))
    for name in ("w", "b"):
        alone = align_models([{name: model[name]} for model in computed], Alignment())
        torch.testing.assert_close(aligned[name], alone[name])


def test_a_stack_leaves_out_directions_that_are_not_finite():
    stacked = {"w": torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(1))}
    stacked["w"][1, 0, 2] = float("inf")
    aligned = align(stacked, Alignment())
    torch.testing.assert_close(aligned["w"][0], align({"w": stacked["w"][0]}, Alignment())["w"])
    rest = align({"w": stacked["w"][1, 1:]}, Alignment())["w"]
    torch.testing.assert_close(aligned["w"][1], rest)


def test_cosines_of_all_pairs_are_0_for_a_zero_direction():
    g = np.array([[1.0, 0.0], [1.0, 1.0], [-2.0, 0.0], [0.0, 0.0]])
    half = 2**-0.5
    np.testing.assert_allclose(cosines(g @ g.T), [half, -1, 0, -half, 0, 0], atol=1e-12)


def test_the_closed_form_on_a_face_meets_the_certificate():
    rng, met = np.random.default_rng(8), 0
    for _ in range(50):
        g = rng.normal(size=(3, 60)) + rng.normal(size=60)
        gram = g @ g.T / (g**2).sum(1).mean()
        b = gram.mean(1)
        c = 0.5 * np.sqrt(b.mean())
        x = minimize_on_face(gram, b, c, np.ones(3, bool))
        if x is not None and (x > 1e-6).all():
            met += 1
            assert optimality_gap(gram, b, c, x) == pytest.approx(0, abs=1e-12)
    assert met > 5
