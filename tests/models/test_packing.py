"""Rows without their padding: the same tokens and gradients as with it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from perdure.models.ops import ForwardPass
from perdure.models.transformer import NO_PACKING, Encoder, make_packing, random_params

WIDTH, LENGTH = 8, 6


def padding_of(lengths: list[int]) -> Tensor:
    return torch.arange(LENGTH) >= torch.tensor(lengths).unsqueeze(1)


def encoder_and_weights(pre_norm: bool) -> tuple[Encoder, dict[str, Tensor]]:
    encoder = Encoder(WIDTH, 3, 2, 12, pre_norm)
    layers = tuple(layer for block in encoder.blocks for layer in block)
    return encoder, random_params(encoder.shapes, layers, torch.Generator().manual_seed(1))


@given(st.lists(st.integers(1, LENGTH), min_size=1, max_size=5))
def test_unpacking_restores_tokens_with_zeros_in_the_padding(lengths: list[int]) -> None:
    padding = padding_of(lengths)
    x = torch.randn(len(lengths), LENGTH, 3, generator=torch.Generator().manual_seed(0))
    packing = make_packing(padding, ForwardPass())
    if sum(lengths) > 0.9 * padding.numel():
        assert packing is NO_PACKING
        return
    packed = packing.pack(x)
    expected = torch.cat([row[:length] for row, length in zip(x, lengths, strict=True)])
    assert torch.equal(packed, expected)
    assert torch.equal(packing.unpack(packed), x.masked_fill(padding.unsqueeze(2), 0.0))


@pytest.mark.parametrize("pre_norm", [True, False])
@pytest.mark.parametrize("prefixed", [True, False])
@pytest.mark.parametrize("first", [None, 2])
def test_an_encoder_gives_equal_results_with_and_without_padding(
    pre_norm: bool, prefixed: bool, first: int | None
) -> None:
    """A pass whose layer inputs are looked at is not packed: it is the reference."""
    encoder, weights = encoder_and_weights(pre_norm)
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randn(4, LENGTH, WIDTH, generator=generator)
    prefix = torch.randn(4, 2, 2 * WIDTH, generator=generator)
    padding = padding_of([2, 6, 3, 4])
    computed = []
    for fwd in (ForwardPass(), ForwardPass(layer_inputs={})):
        leaves = [tokens.clone().requires_grad_(), prefix.clone().requires_grad_()]
        weight = weights["block1.fc1.weight"].clone().requires_grad_()
        params = weights | {"block1.fc1.weight": weight}
        out = encoder(params, leaves[0], fwd, {1: leaves[1]} if prefixed else {}, padding, first)
        real = ~padding[:, :first].unsqueeze(2)
        differentiated = [*leaves, weight] if prefixed else [leaves[0], weight]
        out = out * real
        computed.append([out, *torch.autograd.grad(out.square().sum(), differentiated)])
    for packed, padded in zip(*computed, strict=True):
        torch.testing.assert_close(packed, padded, rtol=1e-4, atol=1e-5)


def test_stacked_clients_and_recorded_layers_keep_their_padding() -> None:
    padding = padding_of([1, 2])
    assert make_packing(padding, ForwardPass()).positions is not None
    for fwd in (
        ForwardPass(stacked=True),
        ForwardPass(layer_inputs={}),
        ForwardPass(input_projections={"fc.weight": {}}),
    ):
        assert make_packing(padding, fwd) is NO_PACKING
    assert make_packing(None, ForwardPass()) is NO_PACKING
