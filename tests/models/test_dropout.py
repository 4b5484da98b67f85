"""Dropout noise: uniform, independent, and the same however a client's pass is run."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats
from torch.func import vmap

from perdure.core.rng import Rng
from perdure.models import ForwardPass, ops

COUNT = 200_000
CPU = torch.device("cpu")


def key(number: int) -> torch.Tensor:
    return torch.tensor(Rng(number).key("dropout", 0, 0, 0))


def uniform(key: torch.Tensor, call: int = 0, count: int = COUNT) -> np.ndarray:
    return ops.uniform_bits(key, call, count, CPU).numpy() / 2**53


def splitmix64(state: int, steps: int) -> int:
    """The generator as its author gives it, in Python's own unbounded integers."""
    mask = (1 << 64) - 1
    z = (state + steps * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def test_noise_equals_splitmix64() -> None:
    """The published first output for seed 0, and many of ours against plain integers."""
    assert splitmix64(0, 1) == 0xE220A8397B1DCDAF
    for number, call in (1234567, 0), ((1 << 63) - 1, 3):
        start = splitmix64(number, call + 1)
        expected = [splitmix64(start, i) >> 11 for i in range(50)]
        assert ops.uniform_bits(torch.tensor(number), call, 50, CPU).tolist() == expected


@pytest.mark.parametrize("small", [0, 1, 2, 10**6])
def test_noise_is_uniform_even_for_small_keys(small: int) -> None:
    values = uniform(torch.tensor(small))
    counts, _ = np.histogram(values, bins=256, range=(0, 1))
    assert stats.chisquare(counts).pvalue > 1e-4
    assert stats.kstest(values, "uniform").pvalue > 1e-4


def test_noise_is_independent_over_keys_calls_and_positions() -> None:
    base = uniform(torch.tensor(5))
    others = [uniform(torch.tensor(6)), uniform(torch.tensor(5), call=1), np.roll(base, 1)]
    for other in others:
        counts, _, _ = np.histogram2d(base, other, bins=16, range=[[0, 1], [0, 1]])
        assert stats.chisquare(counts.ravel()).pvalue > 1e-4


def test_noise_at_one_position_is_uniform_over_keys() -> None:
    values = ops.uniform_bits
    first = np.array([int(values(torch.tensor(k), 0, 1, CPU)) for k in range(4000)]) / 2**53
    assert stats.kstest(first, "uniform").pvalue > 1e-4


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_zeroes_a_fraction_p_and_keeps_the_mean(p: float) -> None:
    x = torch.ones(COUNT)
    out = ops.dropout(x, p, ForwardPass(train=True, key=key(0)))
    dropped = int((out == 0).sum())
    assert stats.binomtest(dropped, COUNT, p).pvalue > 1e-4
    torch.testing.assert_close(out[out != 0], torch.full((COUNT - dropped,), 1 / (1 - p)))


@pytest.mark.parametrize(
    "fwd", [ForwardPass(train=False, key=torch.tensor(1)), ForwardPass(train=True, key=None)]
)
def test_without_training_or_key_nothing_is_dropped(fwd: ForwardPass) -> None:
    x = torch.ones(10)
    assert ops.dropout(x, 0.5, fwd) is x
    assert ops.dropout(x, 0.0, ForwardPass(train=True, key=torch.tensor(1))) is x


def test_each_call_has_different_noise() -> None:
    fwd = ForwardPass(train=True, key=key(1))
    x = torch.ones(1000)
    first, second = ops.dropout(x, 0.5, fwd), ops.dropout(x, 0.5, fwd)
    assert fwd.dropout_calls == 2
    assert not torch.equal(first, second)
    assert torch.equal(first, ops.dropout(x, 0.5, ForwardPass(train=True, key=key(1))))


def test_stacked_clients_have_the_masks_of_single_ones() -> None:
    keys = torch.stack([key(k) for k in range(4)])
    x = torch.randn(4, 6, 10)

    def one(x: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return ops.dropout(x, 0.4, ForwardPass(train=True, key=key, stacked=True))

    alone = torch.stack([one(x[k], keys[k]) for k in range(4)])
    assert torch.equal(vmap(one)(x, keys), alone)


def test_padding_rows_do_not_change_a_mask() -> None:
    x = torch.ones(8, 3, 2, 2)
    whole = ops.dropout(x, 0.5, ForwardPass(train=True, key=key(2)))
    part = ops.dropout(x[:5], 0.5, ForwardPass(train=True, key=key(2)))
    assert torch.equal(whole[:5], part)
