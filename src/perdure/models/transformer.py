"""Transformer blocks that vision and text backbones share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from perdure.core.trees import Tensors
from perdure.models.layers import Layer, linear_layer
from perdure.models.ops import ForwardPass

# ---- Remove padding from rows of tokens, for layers that treat every token separately
#
# A text of 8 tokens in a row of 16 is half padding, on which projections, perceptrons and norms
# would waste time. They get the real tokens of all rows in one list; only attention, which needs
# the rows, gets them back with zeros in the padding.

_WORTH_IT = 0.9
"""Fraction of real tokens below which packing is worth its two copies per block."""


@dataclass(frozen=True)
class Packing:
    """The positions of the real tokens in a batch of rows."""

    positions: Tensor | None = None
    """Indices of the real tokens, row after row, int64 [real]. If None, nothing is packed."""
    rows: int = 0
    """Number of rows."""
    length: int = 0
    """Tokens per row."""

    def pack(self, x: Tensor) -> Tensor:
        """Return the real tokens, [real, width], of rows [rows, length, width]."""
        return x if self.positions is None else x.flatten(0, 1).index_select(0, self.positions)

    def unpack(self, x: Tensor) -> Tensor:
        """Return rows [rows, length, width] of real tokens [real, width], zero in the padding."""
        if self.positions is None:
            return x
        padded = x.new_zeros(self.rows * self.length, x.shape[-1]).index_copy(0, self.positions, x)
        return padded.view(self.rows, self.length, -1)


NO_PACKING = Packing()


def make_packing(padding: Tensor | None, fwd: ForwardPass) -> Packing:
    """Return the packing of a batch.

    Stacked clients keep their padding, since traced steps have fixed shapes; so does a pass that
    records or projects layer inputs.

    Args:
        padding: True for padding, bool [rows, length]. If None, there is none.
        fwd: The forward pass.

    """
    has_fixed_shapes = fwd.stacked or fwd.under_vmap
    if padding is None or has_fixed_shapes or fwd.layer_inputs is not None or fwd.input_projections:
        return NO_PACKING
    positions = (~padding).flatten().nonzero().squeeze(1)
    if len(positions) > _WORTH_IT * padding.numel():
        return NO_PACKING
    return Packing(positions, *padding.shape)


# ---- Transformer blocks that vision and text backbones share
#
# Backbones run without dropout: they are either frozen under prompts, or fine-tuned in few steps
# per round.
#
# Attention is PyTorch's fused operation for one client and is written out for stacked clients. In
# torch 2.13 the fused kernel of CPUs has no batching rule: under vmap it runs client by client,
# which is slower than the plain formula, while without vmap the fused kernel is faster, most of all
# without gradients.

Prefixes = Mapping[int, Tensor]
"""By block: keys and values, [batch, length, 2 * width], that precede the block's keys and values.

Key and value are concatenated, as in the block's projection, so that both are added to it in one
copy of whole rows.
"""
NO_PREFIXES: Prefixes = {}
_INIT_STD = 0.02
"""Standard deviation of random positions, embeddings and CLS tokens."""


@dataclass(frozen=True)
class _AttentionContext:
    """The inputs of a block's attention besides the tokens."""

    prefix: Tensor | None
    """Keys and values that precede the block's, or None."""
    padding: Tensor | None
    """True for padding, bool [batch, N], or None."""
    first: int | None
    """Number of tokens to return, from the first. If None, all."""
    packing: Packing
    """Positions of the real tokens."""


@dataclass(frozen=True)
class Encoder:
    """A stack of blocks: attention and a two-layer perceptron, each with a residual and a norm."""

    width: int
    """Values per token."""
    depth: int
    """Number of blocks."""
    heads: int
    """Attention heads per block."""
    hidden: int
    """Hidden units of a block's perceptron."""
    pre_norm: bool
    """If True, norms precede attention and perceptron and one follows the last block (ViT); if
    False, they follow each (BERT)."""
    eps: float = 1e-12
    """Added to the variance in norms."""

    @cached_property
    def blocks(self) -> tuple[tuple[Layer, ...], ...]:
        """Weight matrices of each block: qkv, out, fc1, fc2.

        Query, key and value are one matrix, since they have the same input: one product, not three.
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
        final = ("norm",) if self.pre_norm else ()
        in_blocks = [f"block{i}.norm{number}" for i in range(self.depth) for number in (1, 2)]
        return (*in_blocks, *final)

    def last_block_names(self, count: int) -> tuple[str, ...]:
        """Return the names of the parameters of the last `count` blocks and of the final norm."""
        blocks = [f"block{i}." for i in range(self.depth - count, self.depth)]
        final = "norm." if count and self.pre_norm else "block-none."
        return tuple(name for name in self.shapes if name.startswith((*blocks, final)))

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each parameter."""
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
        """Return the tokens after all blocks and the final norm.

        Args:
            params: Parameters by name.
            x: Tokens, float [batch, N, width].
            fwd: The forward pass.
            prefixes: Keys and values that precede those of some blocks.
            padding: True for tokens that are not attended to, bool [batch, N].
            first: Number of tokens to return, from the first. If None, all N.

        Returns:
            The tokens, float [batch, N or first, width].

        """
        run_block = self._pre_norm_block if self.pre_norm else self._post_norm_block
        packing, last = make_packing(padding, fwd), self.depth - 1
        x = packing.pack(x)
        for number in range(self.depth):
            count = first if number == last else None
            if count is not None:  # few tokens are left, the same ones of each row
                x, packing = packing.unpack(x), NO_PACKING
            context = _AttentionContext(prefixes.get(number), padding, count, packing)
            x = run_block(params, x, fwd, number, context)
        return packing.unpack(self.norm(params, x, "norm") if self.pre_norm else x)

    def norm(self, params: Tensors, x: Tensor, name: str) -> Tensor:
        """Return x [..., width] after the layer norm with this name."""
        weight, bias = params[f"{name}.weight"], params[f"{name}.bias"]
        return F.layer_norm(x, (self.width,), weight, bias, self.eps)

    def _pre_norm_block(
        self, params: Tensors, x: Tensor, fwd: ForwardPass, n: int, context: _AttentionContext
    ) -> Tensor:
        normalized = self.norm(params, x, f"block{n}.norm1")
        x = _leading(x, context.first) + self._attend(params, normalized, fwd, n, context)
        return x + self._perceptron(params, self.norm(params, x, f"block{n}.norm2"), fwd, n)

    def _post_norm_block(
        self, params: Tensors, x: Tensor, fwd: ForwardPass, n: int, context: _AttentionContext
    ) -> Tensor:
        x = _leading(x, context.first) + self._attend(params, x, fwd, n, context)
        x = self.norm(params, x, f"block{n}.norm1")
        return self.norm(params, x + self._perceptron(params, x, fwd, n), f"block{n}.norm2")

    def _perceptron(self, params: Tensors, x: Tensor, fwd: ForwardPass, number: int) -> Tensor:
        _, _, first, second = self.blocks[number]
        return second(params, F.gelu(first(params, x, fwd)), fwd)

    def _attend(
        self, params: Tensors, x: Tensor, fwd: ForwardPass, n: int, context: _AttentionContext
    ) -> Tensor:
        qkv, out, _, _ = self.blocks[n]
        prefix, pad, packing = context.prefix, context.padding, context.packing
        query, pairs = torch.split(
            packing.unpack(qkv(params, x, fwd)), [self.width, 2 * self.width], -1
        )
        if prefix is not None:
            pairs = torch.cat([prefix, pairs], dim=1)
            pad = None if pad is None else F.pad(pad, (prefix.shape[1], 0))
        query = self._split(_leading(query, context.first))
        keys, values = (self._split(half) for half in pairs.chunk(2, -1))
        attend = attention if fwd.stacked or fwd.under_vmap else fused_attention
        mixed = attend(query, keys, values, pad)
        return out(params, packing.pack(mixed.transpose(1, 2).flatten(2)), fwd)

    def _split(self, x: Tensor) -> Tensor:
        """Return [batch, N, width] as [batch, heads, N, width per head]."""
        return x.reshape(*x.shape[:-1], self.heads, -1).transpose(1, 2)


def _leading(x: Tensor, count: int | None) -> Tensor:
    return x if count is None else x[:, :count]


def attention(query: Tensor, keys: Tensor, values: Tensor, padding: Tensor | None) -> Tensor:
    """Return, per query, the mean of the values weighted by its softmax over the keys.

    Args:
        query: Queries, float [batch, heads, N, size].
        keys: Keys, float [batch, heads, M, size].
        values: Values, float [batch, heads, M, size].
        padding: True for keys that do not count, bool [batch, M], or None.

    Returns:
        The means, float [batch, heads, N, size].

    """
    scores = (query / math.sqrt(query.shape[-1])) @ keys.transpose(-2, -1)
    if padding is not None:
        scores = scores.masked_fill(padding[:, None, None, :], float("-inf"))
    return scores.softmax(-1) @ values


def fused_attention(query: Tensor, keys: Tensor, values: Tensor, padding: Tensor | None) -> Tensor:
    """Return the result of `attention`, computed in one operation."""
    real = None if padding is None else ~padding[:, None, None, :]
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=real)


def parameter_shapes(
    layers: list[Layer], norms: tuple[str, ...], width: int
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of weights, biases and layer norms, by name."""
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in layers:
        shapes |= {layer.name: layer.shape, layer.bias_name: (layer.outputs,)}
    for name in norms:
        shapes |= {f"{name}.weight": (width,), f"{name}.bias": (width,)}
    return shapes


def random_params(
    shapes: Mapping[str, tuple[int, ...]], layers: tuple[Layer, ...], generator: torch.Generator
) -> Tensors:
    """Return random initial values: layers by their scheme, norms as the identity."""
    values: Tensors = {}
    for layer in layers:
        values |= layer.init(generator)
    for name, shape in shapes.items():
        if name not in values:
            values[name] = _random_value(name, shape, generator)
    return {name: values[name] for name in shapes}


def _random_value(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if "norm" in name:
        return torch.ones(shape) if name.endswith("weight") else torch.zeros(shape)
    return torch.empty(shape).normal_(0, _INIT_STD, generator=generator)
