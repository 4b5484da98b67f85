"""Functions of PyTorch under the rules of this library, wherever a module calls them from.

A module may call F.dropout, or F.linear with one of its parameters, instead of modules that can be
replaced (`swaps`). `function_mode` replaces such functions by these. Weights are recognized by
their identity.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from perdure.models import ops
from perdure.models.adapter.current_call import CURRENT
from perdure.models.adapter.swaps import channel_dropout, pair
from perdure.models.layers import Layer, conv_layer
from perdure.models.stacked_conv import ConvGeometry


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
