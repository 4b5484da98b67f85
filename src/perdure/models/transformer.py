"""Transformer blocks, as vision and text backbones share them.

Backbones run without dropout: they are frozen under prompts, and fine-tuned in few steps a round
otherwise.

Attention is PyTorch's fused one for one client and is written out for stacked clients. In torch
2.13 the fused kernel of CPUs has no batching rule: under vmap it runs client by client, which took
1.0 to 2.3 times as long as the plain formula, while without vmap the plain formula took 1.1 to 1.4
times as long in training and up to 2.7 times without gradients (197 tokens).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from perdure.core.trees import Tensors
from perdure.models.forward_pass import ForwardPass
from perdure.models.layers import Layer, linear_layer
from perdure.models.packing import NO_PACKING, Packing, make_packing

Prefixes = Mapping[int, Tensor]
"""By the number of a block: [batch, length, 2 * width], keys and values put before the block's own.

Key and value stand side by side, as in the block's own projection: both then join it in one copy of
whole rows. With two copies of transposed heads a round of PIP took 3 to 4 % longer.
"""
NO_PREFIXES: Prefixes = {}
_START = 0.02
"""Deviation of what starts random and is no weight matrix: positions, embeddings, the CLS token."""


@dataclass(frozen=True)
class _AttentionContext:
    """What the attention of a block has to do with besides the tokens."""

    prefix: Tensor | None
    padding: Tensor | None
    wanted: int | None
    """Tokens that go on, from the first one on; None: all."""
    packing: Packing


@dataclass(frozen=True)
class Encoder:
    """A stack of blocks: attention and a two-layer perceptron, each with a residual and a norm."""

    width: int
    depth: int
    heads: int
    hidden: int
    """Width of the perceptrons' middle."""
    pre_norm: bool
    """Norms before attention and perceptron and one at the end (ViT), or after each (BERT)."""
    eps: float = 1e-12

    @cached_property
    def blocks(self) -> tuple[tuple[Layer, ...], ...]:
        """The weight matrices of each block: qkv, out, fc1, fc2.

        Query, key and value are one matrix, since they see the same input: one product, not three.
        """
        return tuple(
            (
                linear_layer(f"block{i}.qkv", self.width, 3 * self.width),
                linear_layer(f"block{i}.out", self.width, self.width),
                linear_layer(f"block{i}.fc1", self.width, self.hidden),
                linear_layer(f"block{i}.fc2", self.hidden, self.width),
            )
            for i in range(self.depth)
        )

    @cached_property
    def norms(self) -> tuple[str, ...]:
        """Names of the layer norms."""
        last = ("norm",) if self.pre_norm else ()
        each = [f"block{i}.norm{place}" for i in range(self.depth) for place in (1, 2)]
        return (*each, *last)

    def last(self, count: int) -> tuple[str, ...]:
        """Names of the parameters of the last `count` blocks and of the final norm."""
        blocks = [f"block{i}." for i in range(self.depth - count, self.depth)]
        final = "norm." if count and self.pre_norm else "block-none."
        return tuple(name for name in self.shapes if name.startswith((*blocks, final)))

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each parameter."""
        layers = [layer for block in self.blocks for layer in block]
        return parameter_shapes(layers, self.norms, self.width)

    def __call__(
        self,
        params: Tensors,
        x: Tensor,
        fwd: ForwardPass,
        prefixes: Prefixes = NO_PREFIXES,
        padding: Tensor | None = None,
        first: int | None = None,
    ) -> Tensor:
        """Tokens [batch, N, width] through all blocks and the final norm.

        padding: bool [batch, N], true for tokens that nobody attends to.
        first: how many tokens are wanted, from the first on; the last block leaves the rest out.
        """
        step = self._pre if self.pre_norm else self._post
        packing, last = make_packing(padding, fwd), self.depth - 1
        x = packing.pack(x)
        for number in range(self.depth):
            wanted = first if number == last else None
            if wanted is not None:  # few tokens are left, the same ones of each row
                x, packing = packing.unpack(x), NO_PACKING
            around = _AttentionContext(prefixes.get(number), padding, wanted, packing)
            x = step(params, x, fwd, number, around)
        return packing.unpack(self.norm(params, x, "norm") if self.pre_norm else x)

    def norm(self, params: Tensors, x: Tensor, name: str) -> Tensor:
        """A layer norm over the width."""
        weight, bias = params[f"{name}.weight"], params[f"{name}.bias"]
        return F.layer_norm(x, (self.width,), weight, bias, self.eps)

    def _pre(
        self, params: Tensors, x: Tensor, fwd: ForwardPass, n: int, around: _AttentionContext
    ) -> Tensor:
        seen = self.norm(params, x, f"block{n}.norm1")
        x = _leading(x, around.wanted) + self._attend(params, seen, fwd, n, around)
        return x + self._perceive(params, self.norm(params, x, f"block{n}.norm2"), fwd, n)

    def _post(
        self, params: Tensors, x: Tensor, fwd: ForwardPass, n: int, around: _AttentionContext
    ) -> Tensor:
        x = _leading(x, around.wanted) + self._attend(params, x, fwd, n, around)
        x = self.norm(params, x, f"block{n}.norm1")
        return self.norm(params, x + self._perceive(params, x, fwd, n), f"block{n}.norm2")

    def _perceive(self, params: Tensors, x: Tensor, fwd: ForwardPass, number: int) -> Tensor:
        _, _, first, second = self.blocks[number]
        return second(params, F.gelu(first(params, x, fwd)), fwd)

    def _attend(
        self, params: Tensors, x: Tensor, fwd: ForwardPass, n: int, around: _AttentionContext
    ) -> Tensor:
        qkv, out, _, _ = self.blocks[n]
        prefix, pad, packing = around.prefix, around.padding, around.packing
        query, pairs = torch.split(
            packing.unpack(qkv(params, x, fwd)), [self.width, 2 * self.width], -1
        )
        if prefix is not None:
            pairs = torch.cat([prefix, pairs], dim=1)
            pad = None if pad is None else F.pad(pad, (prefix.shape[1], 0))
        query = self._split(_leading(query, around.wanted))
        keys, values = (self._split(part) for part in pairs.chunk(2, -1))
        attend = attention if fwd.stacked or fwd.under_vmap else fused_attention
        mixed = attend(query, keys, values, pad)
        return out(params, packing.pack(mixed.transpose(1, 2).flatten(2)), fwd)

    def _split(self, x: Tensor) -> Tensor:
        """[batch, N, width] to [batch, heads, N, width of a head]."""
        return x.reshape(*x.shape[:-1], self.heads, -1).transpose(1, 2)


def _leading(x: Tensor, count: int | None) -> Tensor:
    return x if count is None else x[:, :count]


def attention(query: Tensor, keys: Tensor, values: Tensor, padding: Tensor | None) -> Tensor:
    """Each query's mean of the values, weighted by its softmax over the keys: [batch, heads, ...].

    padding: bool [batch, keys], true for keys that do not count.
    """
    scores = (query / math.sqrt(query.shape[-1])) @ keys.transpose(-2, -1)
    if padding is not None:
        scores = scores.masked_fill(padding[:, None, None, :], float("-inf"))
    return scores.softmax(-1) @ values


def fused_attention(query: Tensor, keys: Tensor, values: Tensor, padding: Tensor | None) -> Tensor:
    """The same in one operation."""
    real = None if padding is None else ~padding[:, None, None, :]
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=real)


def parameter_shapes(
    layers: list[Layer], norms: tuple[str, ...], width: int
) -> dict[str, tuple[int, ...]]:
    """The shapes of weights, biases and layer norms."""
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in layers:
        shapes |= {layer.name: layer.shape, layer.bias_name: (layer.outputs,)}
    for name in norms:
        shapes |= {f"{name}.weight": (width,), f"{name}.bias": (width,)}
    return shapes


def random_params(
    shapes: Mapping[str, tuple[int, ...]], layers: tuple[Layer, ...], generator: torch.Generator
) -> Tensors:
    """First values where nothing was pretrained: layers as elsewhere, norms as the identity."""
    values: Tensors = {}
    for layer in layers:
        values |= layer.init(generator)
    for name, shape in shapes.items():
        if name not in values:
            values[name] = _first(name, shape, generator)
    return {name: values[name] for name in shapes}


def _first(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if "norm" in name:
        return torch.ones(shape) if name.endswith("weight") else torch.zeros(shape)
    return torch.empty(shape).normal_(0, _START, generator=generator)
