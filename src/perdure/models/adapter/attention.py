"""Attention under the rules of this library: hashed dropout, recorded inputs, stacked clients."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from perdure.models import ops
from perdure.models.adapter.current_call import CURRENT
from perdure.models.adapter.functions import linear

_NEGATIVE_INFINITY = float("-inf")


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return attention as F.scaled_dot_product_attention does.

    Its fused kernel draws its own noise and has no batching rule: with dropout and under vmap the
    formula is written out.
    """
    fwd = CURRENT.fwd
    plain = not (fwd.stacked or fwd.under_vmap or (dropout_p and fwd.train))
    if plain or enable_gqa:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    weights = _weights(query, key, _mask(query, key, attn_mask, is_causal), scale)
    return ops.dropout(weights, dropout_p, fwd) @ value


def _mask(query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor | None:
    """Return what is added to the scores."""
    if is_causal:
        shape = (query.shape[-2], key.shape[-2])
        return _added(torch.ones(shape, dtype=torch.bool, device=query.device).tril(), query)
    return mask if mask is None or mask.dtype != torch.bool else _added(mask, query)


def _added(allowed: Tensor, like: Tensor) -> Tensor:
    """Return 0 where attention is allowed, else minus infinity."""
    zeros = torch.zeros(allowed.shape, dtype=like.dtype, device=like.device)
    return zeros.masked_fill(~allowed, _NEGATIVE_INFINITY)


def _weights(query: Tensor, key: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = (query * scale) @ key.transpose(-2, -1)
    return (scores if mask is None else scores + mask).softmax(-1)


def multi_head_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    *_: Any,
    average_attn_weights: bool = True,
    is_causal: bool = False,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """Return attention as F.multi_head_attention_forward does, which nn.MultiheadAttention calls.

    Query, key and value are [length, rows, width].
    """
    if use_separate_proj_weight or bias_k is not None or add_zero_attn or in_proj_weight is None:
        raise NotImplementedError("MultiheadAttention with kdim, bias_k or add_zero_attn")
    rows = [t.transpose(0, 1) if t.dim() == 3 else t for t in (query, key, value)]
    same = query is key and key is value
    q, k, v = (
        _split(part, num_heads) for part in _projected(rows, in_proj_weight, in_proj_bias, same)
    )
    mask = _joined_mask(attn_mask, key_padding_mask, num_heads, q)
    weights = None
    rate = dropout_p if training else 0.0
    if need_weights:
        weights = ops.dropout(_weights(q, k, mask, None), rate, CURRENT.fwd)
        mixed = weights @ v
        weights = weights.mean(-3) if average_attn_weights else weights
    else:
        mixed = scaled_dot_product_attention(q, k, v, mask, rate)
    out = linear(mixed.transpose(-3, -2).flatten(-2), out_proj_weight, out_proj_bias)
    return (out.transpose(0, 1) if query.dim() == 3 else out), weights


def _projected(
    rows: list[Tensor], weight: Tensor, bias: Tensor | None, same: bool
) -> tuple[Tensor, ...]:
    """Return the projections of query, key and value, [rows, length, width] each."""
    if same:
        return linear(rows[0], weight, bias).chunk(3, -1)
    name = CURRENT.names.get(id(weight))
    if CURRENT.unrecorded is not None and name is not None:
        CURRENT.unrecorded.add(name)  # one weight with three inputs
    biases = (None,) * 3 if bias is None else bias.chunk(3)
    parts = zip(rows, weight.chunk(3), biases, strict=True)
    return tuple(F.linear(x, w, b) for x, w, b in parts)


def _split(x: Tensor, heads: int) -> Tensor:
    """Return [..., length, width] as [..., heads, length, width / heads]."""
    return x.reshape(*x.shape[:-1], heads, -1).transpose(-3, -2)


def _joined_mask(
    mask: Tensor | None, padding: Tensor | None, heads: int, like: Tensor
) -> Tensor | None:
    """Return both masks as what is added to the scores; True in a boolean mask means: left out."""
    if mask is not None:
        mask = _added(~mask, like) if mask.dtype == torch.bool else mask
        mask = mask.reshape(-1, heads, *mask.shape[1:]) if mask.dim() == 3 else mask
    if padding is None:
        return mask
    padding = _added(~padding, like) if padding.dtype == torch.bool else padding
    added = padding[:, None, None, :]
    return added if mask is None else added + mask
