"""Coresets and MixStyle against plain numpy."""

import numpy as np
import pytest
import torch

from perdure.algebra.coresets import (
    draw_mix_weights,
    herding,
    mixstyle,
    prototype,
    select_by_eq5,
    select_matching,
)


def features(rows=30, width=5, seed=0):
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def test_prototype_is_the_mean_over_all_rows_so_far():
    new, old = features(6), features(3, seed=1)
    np.testing.assert_allclose(prototype(new), new.numpy().mean(0), atol=1e-6)
    expected = (14 * old.numpy().mean(0) + new.numpy().sum(0)) / 20
    np.testing.assert_allclose(prototype(new, old, 14), expected, atol=1e-6)


def greedy(z, target, count):
    chosen = []
    for _ in range(count):
        left = [i for i in range(len(z)) if i not in chosen]
        costs = [np.linalg.norm(z[[*chosen, i]].mean(0) - target) for i in left]
        chosen.append(left[int(np.argmin(costs))])
    return chosen


def test_herding_is_greedy_and_without_repeats():
    z = features()
    target = z.mean(0)
    assert herding(z, target, 8).tolist() == greedy(z.numpy(), target.numpy(), 8)
    assert sorted(herding(z, target, 99).tolist()) == list(range(30))


def test_herding_keeps_the_mean_better_than_chance():
    z = features(200, 10)
    herded_mean = z[herding(z, z.mean(0), 20)].mean(0)
    generator = torch.Generator().manual_seed(0)
    chance_means = [z[torch.randperm(200, generator=generator)[:20]].mean(0) for _ in range(50)]
    assert (herded_mean - z.mean(0)).norm() < min(
        (mean - z.mean(0)).norm() for mean in chance_means
    )


def test_matching_is_the_random_set_with_the_nearest_mean():
    z = features(60, 10)
    target = z.mean(0)
    chosen = select_matching(z, target, 15, torch.Generator().manual_seed(3))
    keys = torch.rand(100, 60, generator=torch.Generator().manual_seed(3)).numpy()
    sets = np.argsort(keys, 1)[:, :15]
    distances = np.linalg.norm(z.numpy()[sets].mean(1) - target.numpy(), axis=1)
    assert chosen.tolist() == sets[distances.argmin()].tolist()
    assert len(set(chosen.tolist())) == 15
    everything = select_matching(z, target, 99, torch.Generator().manual_seed(3))
    assert sorted(everything.tolist()) == list(range(60))


def test_matching_does_not_prefer_rows_near_the_mean():
    z = features(400, 10)

    def spread(rows):
        return float((z[rows] - z.mean(0)).norm(dim=1).mean())

    matched = spread(select_matching(z, z.mean(0), 10, torch.Generator().manual_seed(0)))
    assert spread(herding(z, z.mean(0), 10)) < 0.9 * spread(range(400))
    assert matched == pytest.approx(spread(range(400)), rel=0.1)


def test_select_by_eq5_takes_the_largest_weights_after_gradient_descent():
    z, old = features(12, 4).double(), features(3, 4, seed=2).double()
    target, rows = prototype(z, old, 9), z.numpy()
    a = np.full(12, 1 / 12)
    step = 1 / (2 * np.linalg.norm(rows / 12, 2) ** 2)
    for _ in range(100):
        a = a - step * 2 * (rows / 12) @ (old.numpy().mean(0) + a @ rows / 12 - target.numpy())
    expected = np.argsort(-a)[:5]
    assert select_by_eq5(z, target, 5, old).tolist() == expected.tolist()


@pytest.mark.parametrize("shape", [(3, 4, 4), (9,)])
def test_mixstyle_interpolates_mean_and_deviation(shape):
    generator = torch.Generator().manual_seed(0)
    content, style = torch.randn(2, 6, *shape, generator=generator)
    share = torch.rand(6, generator=generator)
    out = mixstyle(content, style, share).numpy()
    axes = (1, 2) if len(shape) == 3 else (0,)
    for c, s, lam, o in zip(content.numpy(), style.numpy(), share.numpy(), out, strict=True):

        def std(x):
            return np.sqrt(x.var(axes, keepdims=True, ddof=1) + 1e-6)

        gamma = lam * std(c) + (1 - lam) * std(s)
        beta = lam * c.mean(axes, keepdims=True) + (1 - lam) * s.mean(axes, keepdims=True)
        np.testing.assert_allclose(
            o, gamma * (c - c.mean(axes, keepdims=True)) / std(c) + beta, atol=1e-5
        )
    same = mixstyle(content, style, torch.ones(6))
    torch.testing.assert_close(same, content, atol=1e-5, rtol=1e-5)


def test_mix_weights_are_drawn_from_beta():
    drawn = draw_mix_weights(20_000, torch.Generator().manual_seed(0))
    assert float(drawn.mean()) == pytest.approx(0.5, abs=0.02)
    # the variance of Beta(a, a) is 1 / (4 (2 a + 1))
    assert float(drawn.var()) == pytest.approx(1 / 4.8, abs=0.01)
    assert drawn.min() >= 0
    assert drawn.max() <= 1


def test_matching_does_not_depend_on_rounding_between_equally_near_sets():
    z = torch.randn(4, 6, generator=torch.Generator().manual_seed(5))  # halves are equally near
    chosen = [
        select_matching(noisy, noisy.mean(0), 2, torch.Generator().manual_seed(0)).tolist()
        for noisy in (z + 3e-7 * torch.randn(z.shape, generator=torch.Generator().manual_seed(k))
                      for k in range(20))
    ]  # fmt: skip
    assert chosen == chosen[:1] * 20
