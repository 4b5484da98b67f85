"""Functions of PyTorch under the rules of this library, wherever a module calls them from."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from perdure.models import ops
from perdure.models.adapter.swaps import CURRENT, channel_dropout, pair
from perdure.models.layers import Layer, conv_layer
from perdure.models.stacked import ConvGeometry

# ---- Functions of PyTorch under the rules of this library, wherever a module calls them from
#
# A module may call F.dropout, or F.linear with one of its parameters, instead of modules that can
# be replaced (`swaps`). `function_mode` replaces such functions by these. Weights are recognized by
# their identity.


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Apply a layer; its input is recorded if the weight is a parameter."""
    name = CURRENT.names.get(id(weight))
    if name is None:
        return F.linear(input, weight, bias)
    if CURRENT.layers is not None:
        outputs, inputs = weight.shape
        CURRENT.layers[name] = Layer(name, "linear", inputs, outputs, bias=bias is not None)
    return ops.linear(input, weight, bias, CURRENT.fwd, name)


def conv2d(
    input: Tensor, weight: Tensor, bias: Tensor | None = None,
    stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1,
) -> Tensor:  # fmt: skip
    """Apply a convolution; its input is recorded if the weight is a parameter."""
    name = CURRENT.names.get(id(weight))
    if name is None or isinstance(padding, str):
        return F.conv2d(input, weight, bias, stride, padding, dilation, groups)
    return _conv(input, weight, bias, name, ConvGeometry(
        pair(stride), pair(padding), pair(dilation), groups))  # fmt: skip


def conv1d(
    input: Tensor, weight: Tensor, bias: Tensor | None = None,
    stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1,
) -> Tensor:  # fmt: skip
    """Apply a convolution to sequences, as images of height 1."""
    name = CURRENT.names.get(id(weight))
    if name is None or isinstance(padding, str) or input.dim() != 3:
        return F.conv1d(input, weight, bias, stride, padding, dilation, groups)
    stride, padding, dilation = (_one(value) for value in (stride, padding, dilation))
    geometry = ConvGeometry((1, stride), (0, padding), (1, dilation), groups)
    return _conv(input.unsqueeze(-2), weight.unsqueeze(-2), bias, name, geometry).squeeze(-2)


def _one(value: Any) -> int:
    return int(value[0] if isinstance(value, tuple | list) else value)


def _conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, name: str, geometry: ConvGeometry
) -> Tensor:
    if CURRENT.layers is not None:
        CURRENT.layers[name] = conv_layer(name, weight.shape, geometry, bias is not None)
    return ops.conv2d(x, weight, bias, CURRENT.fwd, name, geometry)


def batch_norm(
    input: Tensor, running_mean: Tensor | None, running_var: Tensor | None,
    weight: Tensor | None = None, bias: Tensor | None = None, training: bool = False,
    momentum: float = 0.1, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """Normalize with masked statistics; running ones must be buffers of the module."""
    name = CURRENT.names.get(id(running_mean)) if running_mean is not None else None
    if running_mean is not None and name is None:
        raise NotImplementedError("batch norm with statistics that are not buffers of the module")
    prefix = None if name is None else name.removesuffix(".running_mean")
    fwd = CURRENT.fwd
    if fwd.train and not training:  # a norm that its owner keeps in evaluation mode
        fwd = replace(fwd, batch_statistics=False)
    return ops.batch_norm(input, fwd, weight, bias, prefix, momentum, eps)


def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Zero elements by hashed noise."""
    return ops.dropout(input, p, CURRENT.fwd) if training else input


def dropout_of_channels(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    """Zero channels by hashed noise."""
    return channel_dropout(input, p, CURRENT.fwd) if training else input


def group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """Normalize groups of channels within each row."""
    return ops.group_norm(input, num_groups, weight, bias, CURRENT.fwd, eps)


def bernoulli_(self: Tensor, p: Any = 0.5, *, generator: Any = None) -> Tensor:
    """Return hashed zeros and ones, as stochastic depth of torchvision and timm draws them."""
    fwd = CURRENT.fwd
    if isinstance(p, Tensor):
        raise NotImplementedError("bernoulli_ with a tensor of probabilities")
    if fwd.key is None:
        return torch.ones_like(self)
    call, fwd.dropout_calls = fwd.dropout_calls, fwd.dropout_calls + 1
    bits = ops.uniform_bits(fwd.key, call, math.prod(self.shape), self.device)
    return (bits < int(p * (1 << 53))).reshape(self.shape).to(self.dtype)


# ---- Attention under the rules of this library: hashed dropout, recorded inputs, stacked clients.

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


# ---- Replace functions of PyTorch while a module is called

OnCall = Callable[[Any, tuple[Any, ...], dict[str, Any]], None]

RULES: dict[Any, Callable[..., Any]] = {
    F.linear: linear,
    torch.conv2d: conv2d,
    torch.conv1d: conv1d,
    F.batch_norm: batch_norm,
    F.dropout: dropout,
    torch.dropout: dropout,
    **dict.fromkeys((F.dropout1d, F.dropout2d, F.dropout3d), dropout_of_channels),
    F.group_norm: group_norm,
    Tensor.bernoulli_: bernoulli_,
    F.scaled_dot_product_attention: scaled_dot_product_attention,
    F.multi_head_attention_forward: multi_head_attention,
}
"""Replacements by function."""


class FunctionMode(TorchFunctionMode):
    """Replaces functions by `RULES` while it is active."""

    def __init__(self, on_call: OnCall | None = None) -> None:
        super().__init__()
        self.on_call = on_call

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call the rule of a function, or the function itself."""
        kwargs = kwargs or {}
        if self.on_call is not None:
            self.on_call(func, args, kwargs)
        return RULES.get(func, func)(*args, **kwargs)
