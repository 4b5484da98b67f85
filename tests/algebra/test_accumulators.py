"""Input columns of layers, and their accumulation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.linalg import sqrtm
from torch.nn import functional as F

from perdure.algebra.sketches import ColumnSample, GramAccumulator
from perdure.methods.parts import protected_layers
from perdure.methods.parts.protected_layers import column_blocks, layer_columns
from perdure.models.layers import Layer, conv_layer, linear_layer
from perdure.models.stacked import ConvGeometry


@pytest.mark.parametrize(
    "layer",
    [
        conv_layer("c.weight", (5, 3, 3, 3), ConvGeometry((1, 1), (1, 1))),
        conv_layer("c.weight", (5, 3, 3, 3), ConvGeometry((2, 2), (1, 1))),
        conv_layer("c.weight", (5, 3, 4, 4), ConvGeometry((1, 1), (0, 0))),
        conv_layer("c.weight", (5, 3, 1, 1), ConvGeometry((2, 2), (0, 0))),
        conv_layer("c.weight", (5, 3, 1, 1), ConvGeometry()),
    ],
    ids=lambda layer: f"k{layer.kernel[0]}s{layer.geometry.stride[0]}p{layer.geometry.padding[0]}",
)
def test_weight_times_columns_is_the_convolution(layer: Layer) -> None:
    x, weight = torch.randn(2, 3, 9, 7), torch.randn(layer.shape)
    columns = layer_columns(x, layer)
    assert columns.shape[0] == layer.inputs
    product = weight.reshape(layer.outputs, -1) @ columns
    expected = F.conv2d(x, weight, None, *layer.geometry.args)
    torch.testing.assert_close(
        product, expected.transpose(0, 1).reshape(5, -1), atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize(
    ("kernel", "geometry"),
    [
        ((3, 5), ConvGeometry((1, 2), (1, 2))),
        ((3, 2), ConvGeometry(padding=(2, 1), dilation=(2, 3))),
        ((3, 3), ConvGeometry((2, 1), (1, 0), groups=2)),
        ((3, 3), ConvGeometry((1, 2), dilation=(2, 1), groups=8)),
    ],
)
def test_a_change_outside_of_the_columns_changes_no_output(
    kernel: tuple[int, int], geometry: ConvGeometry
) -> None:
    """Few images, so that the columns of every geometry leave directions free."""
    channels = 8 // geometry.groups
    inputs = channels * kernel[0] * kernel[1]
    layer = Layer("c.weight", "conv", inputs, 16, kernel, geometry)
    basis = torch.randn(2, 8, 1, 1, dtype=torch.float64)
    x = torch.ones(2, 8, 9, 7, dtype=torch.float64) * basis  # constant images: few patches
    columns = layer_columns(x, layer)
    u, s, _ = torch.linalg.svd(columns, full_matrices=True)
    rank = int((s > 1e-9 * s[0]).sum())
    assert 0 < rank < inputs
    free = u[:, rank:]
    change = (torch.randn(16, inputs, dtype=torch.float64) @ free @ free.T).reshape(layer.shape)
    assert F.conv2d(x, change, None, *geometry.args).abs().max() < 1e-12
    assert change.abs().max() > 1e-3


@pytest.mark.parametrize("kernel", [1, 3])
def test_blocks_of_columns_are_small_and_in_order(
    kernel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, layer = (
        torch.randn(5, 3, 9, 7),
        conv_layer("c.weight", (5, 3, kernel, kernel), ConvGeometry()),
    )
    monkeypatch.setattr(protected_layers, "BLOCK_VALUES", 2 * x[0].numel() * kernel**2)
    blocks = list(column_blocks(x, layer))
    assert len(blocks) == 3
    assert torch.equal(torch.cat(blocks, dim=1), layer_columns(x, layer))


def test_columns_of_a_linear_layer_are_its_input_rows() -> None:
    x = torch.randn(4, 6)
    assert torch.equal(layer_columns(x, linear_layer("f", 6, 2)), x.T)
    tokens = torch.randn(4, 3, 6)
    assert torch.equal(layer_columns(tokens, linear_layer("f", 6, 2)), tokens.reshape(12, 6).T)


@pytest.mark.parametrize("blocks", [[2], [2, 1], [3, 9, 2], [30]])
def test_root_is_the_symmetric_root_for_any_number_of_columns(blocks: list[int]) -> None:
    blocks_of_columns = [torch.randn(5, count) for count in blocks]
    accumulator = GramAccumulator()
    for columns in blocks_of_columns:
        accumulator.add(columns)
    root, whole = (
        accumulator.root().double().numpy(),
        torch.cat(blocks_of_columns, 1).double().numpy(),
    )
    np.testing.assert_allclose(root @ root.T, whole @ whole.T, atol=1e-5)
    np.testing.assert_allclose(root, sqrtm(whole @ whole.T).real, atol=1e-4)


def test_a_small_change_of_the_columns_changes_the_root_little() -> None:
    """Two engines' inputs differ in the last digits: their sketches must not differ in more."""
    whole = torch.eye(12).repeat(1, 3)  # all directions are equal: eigenvectors are arbitrary
    perturbed = whole + 1e-6 * torch.randn(12, 36, generator=torch.Generator().manual_seed(1))
    roots = []
    for columns in (whole, perturbed):
        accumulator = GramAccumulator()
        accumulator.add(columns)
        roots.append(accumulator.root())
    torch.testing.assert_close(*roots, rtol=1e-4, atol=1e-4)


def test_a_sample_is_uniform_and_without_replacement() -> None:
    counts = np.zeros(12)
    generator = torch.Generator().manual_seed(0)
    for _ in range(600):
        sample = ColumnSample(4, generator)
        for block in torch.arange(12.0).reshape(1, 12).split([5, 1, 6], dim=1):
            sample.add(block)
        drawn = sample.columns()[0].long().numpy()
        assert len(set(drawn)) == 4
        counts[drawn] += 1
    assert stats.chisquare(counts).pvalue > 1e-3
    keys = torch.rand(12, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    whole = ColumnSample(4, torch.Generator().manual_seed(3))
    whole.add(torch.arange(12.0).reshape(1, 12))
    assert whole.columns()[0].tolist() == np.argsort(keys.numpy())[:4].tolist()
    few = ColumnSample(4, generator)
    few.add(torch.ones(3, 2))
    assert few.columns().shape == (3, 2)
