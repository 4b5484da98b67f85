from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from perdure.core.errors import UserError
from perdure.data.examples import Examples, Normalization, Source
from perdure.data.images import convert_channels, fit_images, resize
from perdure.data.normalization import channel_moments, normalize_source
from perdure.data.sources.arrays import DigitsData


def images(rows=30, channels=3, height=4, width=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, channels, height, width)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def normalized(x, test, config, key="data"):
    """Return training and test rows as the config has them normalized."""
    rows = [Examples(part, torch.zeros(len(part), dtype=torch.int64)) for part in (x, test)]
    source = normalize_source(Source("rows", rows[0], rows[1], ("0",)), config, key)
    return source.train, source.test


def test_channel_moments_are_those_of_numpy():
    x = images(rows=20_000)  # several chunks
    mean, std = channel_moments(x)
    values = x.numpy().astype(np.float64)
    assert np.allclose(mean, values.mean((0, 2, 3)), rtol=1e-12)
    assert np.allclose(std, values.std((0, 2, 3)), rtol=1e-10)


def test_a_constant_channel_can_be_divided_by():
    x = images()
    x[:, 1] = 7
    train, _ = normalized(x, x, DigitsData())
    values = train.gather(torch.arange(30))
    assert torch.isfinite(values).all()
    assert values[:, 1].abs().max() < 1e-5


@pytest.mark.parametrize("channels", [1, 3])
def test_normalization_is_computed_from_the_training_rows(channels):
    x, other = images(200, channels), images(20, channels, seed=1) // 2
    train, test = normalized(x, other, DigitsData())
    values = train.gather(torch.arange(200))
    assert values.shape == (200, channels, 4, 5)
    assert values.dtype == torch.float32
    assert torch.allclose(values.mean((0, 2, 3)), torch.zeros(channels), atol=1e-5)
    assert torch.allclose(values.std((0, 2, 3), correction=0), torch.ones(channels), atol=1e-5)
    mean = x.double().mean((0, 2, 3)).view(-1, 1, 1)
    std = x.double().std((0, 2, 3), correction=0).view(-1, 1, 1)
    wanted = ((other.double() - mean) / std).float()  # the test rows by the training constants
    assert torch.allclose(test.gather(torch.arange(20)), wanted, atol=1e-5)


def test_normalization_uses_given_constants():
    x = images()
    config = DigitsData(mean=[0.5, 0.4, 0.3], std=[0.2, 0.25, 0.5])
    train, _ = normalized(x, x, config)
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (config.mean, config.std))
    wanted = (x.float() / 255 - mean) / std
    assert torch.allclose(train.gather(torch.arange(30)), wanted, atol=1e-5)
    one, _ = normalized(x, x, DigitsData(mean=[0.5], std=[0.25]))
    wanted = (x.float() / 255 - 0.5) / 0.25
    assert torch.allclose(one.gather(torch.arange(30)), wanted, atol=1e-5)
    only_mean, _ = normalized(x, x, DigitsData(mean=[0.0]))
    std = x.double().std((0, 2, 3), correction=0).view(-1, 1, 1).float()
    assert torch.allclose(only_mean.gather(torch.arange(30)), x / std, atol=1e-5)


def test_normalization_can_be_switched_off():
    x = images()
    train, _ = normalized(x, x, DigitsData(normalize=False))
    assert torch.allclose(train.gather(torch.arange(30)), x / 255, atol=1e-7)
    words = x.flatten(1)
    train, _ = normalized(words, words, DigitsData(normalize=False))
    assert torch.equal(train.gather(torch.arange(30)), words.float())


def test_normalization_takes_one_constant_per_channel():
    x = images()
    with pytest.raises(UserError, match=r"^stream\.domains\.2\.mean: .*, got \[0\.1, 0\.2\]$"):
        normalized(x, x, DigitsData(mean=[0.1, 0.2]), "stream.domains.2")


@given(st.integers(0, 2**31), st.sampled_from([1, 3]))
@settings(max_examples=20, deadline=None)
def test_a_permutation_moves_normalized_values(seed, channels):
    x = images(8, channels, seed=seed)
    plain, _ = normalized(x, x, DigitsData())
    order = torch.randperm(channels * 20, generator=torch.Generator().manual_seed(seed))
    moved = replace(plain, permutation=order)
    assert moved.rows.data_ptr() == plain.rows.data_ptr()
    index = torch.tensor([5, 0, 5])
    wanted = plain.gather(index).flatten(1)[:, order].view(3, channels, 4, 5)
    assert torch.equal(moved.gather(index), wanted)


def test_gather_takes_an_index_of_any_shape():
    x = images()
    train, _ = normalized(x, x, DigitsData())
    index = torch.tensor([[1, 2, 3], [29, 0, 1]])
    values = train.gather(index)
    assert values.shape == (2, 3, 3, 4, 5)
    assert torch.equal(values[1, 0], train.gather(torch.tensor([29]))[0])
    assert torch.equal(values[1, 0], train.gather(torch.tensor(29)))
    assert train.gather(torch.empty(0, dtype=torch.int64)).shape == (0, 3, 4, 5)


def test_rows_are_not_copied():
    x = images()
    train, _ = normalized(x, x, DigitsData())
    assert train.rows.data_ptr() == x.data_ptr()
    before = x.clone()
    train.gather(torch.arange(30)).mul_(0)
    assert torch.equal(before, x)


def test_channels_are_normalized_by_different_constants():
    rows = torch.tensor([[10, 20]], dtype=torch.uint8)
    normalization = Normalization(torch.tensor([1.0, 2.0]), torch.tensor([0.5, 0.0]))
    examples = Examples(rows, torch.tensor([0]), normalization=normalization)
    assert examples.gather(torch.tensor([0])).tolist() == [[10.5, 40.0]]


def test_resize_keeps_constants_and_matches_hand_computed_values():
    assert resize(torch.full((1, 1, 3, 3), 9, dtype=torch.uint8), 7, 5).unique().tolist() == [9]
    x = torch.tensor([[[[0, 100]]]], dtype=torch.uint8)
    # bilinear between pixel centers: 0, 1/4, 3/4, 1 of the way
    assert resize(x, 1, 4).flatten().tolist() == [0, 25, 75, 100]
    halved = resize(torch.tensor([[[[0, 0, 200, 200]]]], dtype=torch.uint8), 1, 2)
    assert halved[0, 0, 0, 0] < 100 < halved[0, 0, 0, 1]


def test_color_to_gray_is_brightness():
    x = torch.tensor([200, 100, 50], dtype=torch.uint8).view(1, 3, 1, 1)
    assert convert_channels(x, 1).item() == round(0.299 * 200 + 0.587 * 100 + 0.114 * 50)
    assert convert_channels(x[:, :1], 3).flatten().tolist() == [200] * 3
    assert fit_images(x, (1, 2, 3)).shape == (1, 1, 2, 3)
