"""Forwards that replace those of PyTorch's modules, so that they follow this library's rules."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType, MethodType
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from perdure.core.trees import Tensors
from perdure.models import ops
from perdure.models.layers import Layer, conv_layer
from perdure.models.ops import ForwardPass
from perdure.models.stacked import ConvGeometry, Pair

# ---- What the replaced forwards of a module read while it is called


class _CurrentCall(threading.local):
    """The call of a module that this thread is in."""

    params: Tensors = MappingProxyType({})  # type: ignore[assignment]
    """The parameters of the call, by name."""
    fwd: ForwardPass = ForwardPass()
    """The forward pass of the call."""
    names: dict[int, str] = MappingProxyType({})  # type: ignore[assignment]
    """Names of the tensors that functions may be called with directly, by id."""
    layers: dict[str, Layer] | None = None
    """If a dict, layers that functions apply directly are added to it, by weight name."""
    unrecorded: set[str] | None = None
    """If a set, names of weights whose inputs are not recorded are added to it."""


CURRENT = _CurrentCall()


# ---- Call the parts of a Sequential without the work that nn.Module.__call__ does for hooks
#
# It takes about a microsecond per part, a tenth of a small layer's forward pass.

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def call_directly(module: nn.Module) -> None:
    """Replace the forward of each Sequential in a module whose parts have no hooks."""
    for part in module.modules():
        if is_plain_sequence(part):
            replaced: Any = part
            replaced.forward = MethodType(_in_order, part)  # a deep copy binds it to its own


def _in_order(self: nn.Sequential, x: Tensor) -> Tensor:
    for part in self._modules.values():
        x = part.forward(x)
    return x


def is_plain_sequence(module: nn.Module) -> bool:
    """Return whether a module is a Sequential whose parts have neither hooks nor their own call."""
    return type(module) is nn.Sequential and all(
        type(part).__call__ is nn.Module.__call__
        and part._compiled_call_impl is None
        and not any(getattr(part, hooks) for hooks in _HOOKS)
        for part in module
    )


# ---- Forwards that replace those of PyTorch's modules, so that they follow the rules of this
# library
#
# Each reads its parameters from the current call and applies a function of `models.ops`: inputs are
# recorded, noise is hashed, statistics are masked, and clients can be stacked. Only modules of
# exactly these types are replaced, since a subclass may do something else.

Forward = Callable[[Tensor], Tensor]
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@dataclass(frozen=True)
class Swap:
    """The replacement of one module's forward."""

    forward: Forward
    names: tuple[str, ...] = ()
    """Names of the parameters that it reads."""
    layer: Layer | None = None
    """The weight layer, if the module is one."""


@dataclass(frozen=True)
class Part:
    """A module within the user's module."""

    module: Any
    path: str
    """Where it is, such as layer1.0.bn1."""
    name: str
    """Our name of this place."""
    known: Mapping[str, str]
    """Our names of all parameters by path; tied ones have the same name."""
    fixed_statistics: bool = False
    """Whether batch norm always uses its running statistics."""

    def parameter(self, key: str) -> str | None:
        """Return the name of one of its parameters; None if it has none of this key."""
        return self.known.get(f"{self.path}.{key}" if self.path else key)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of its weight and bias."""
        return tuple(n for n in (self.parameter("weight"), self.parameter("bias")) if n)


def make_swap(part: Part) -> Swap | None:
    """Return the replacement of a module's forward; None if the module is left as it is."""
    make = SWAPS.get(type(part.module))
    if make is None or (getattr(part.module, "weight", None) is not None and not part.names):
        return None
    return make(part)


def _linear(part: Part) -> Swap | None:
    weight, bias = part.parameter("weight"), part.parameter("bias")
    if weight is None:
        return None
    outputs, inputs = part.module.weight.shape

    def forward(x: Tensor) -> Tensor:
        params = CURRENT.params
        return ops.linear(x, params[weight], params[bias] if bias else None, CURRENT.fwd, weight)

    return Swap(
        forward, part.names, Layer(weight, "linear", inputs, outputs, bias=bias is not None)
    )


def _conv(part: Part) -> Swap | None:
    weight, bias = part.parameter("weight"), part.parameter("bias")
    if weight is None:
        return None
    geometry, before = conv_geometry(part.module)
    mode = part.module.padding_mode
    mode = "constant" if mode == "zeros" else mode

    def forward(x: Tensor) -> Tensor:
        if before is not None:
            x = F.pad(x, before, mode=mode)
        params = CURRENT.params
        return ops.conv2d(
            x, params[weight], params[bias] if bias else None, CURRENT.fwd, weight, geometry
        )

    layer = conv_layer(weight, part.module.weight.shape, geometry, bias is not None)
    return Swap(forward, part.names, layer)


def conv_geometry(conv: nn.Conv2d) -> tuple[ConvGeometry, list[int] | None]:
    """Return the geometry of a convolution, and what is padded before it, or None."""
    stride, dilation = pair(conv.stride), pair(conv.dilation)
    plain = ConvGeometry(stride, (0, 0), dilation, conv.groups)
    if conv.padding_mode != "zeros":
        return plain, list(conv._reversed_padding_repeated_twice)
    if conv.padding == "valid":
        return plain, None
    if conv.padding != "same":
        return replace(plain, padding=pair(conv.padding)), None
    total = [d * (k - 1) for d, k in zip(dilation, pair(conv.kernel_size), strict=True)]
    if all(value % 2 == 0 for value in total):
        return replace(plain, padding=(total[0] // 2, total[1] // 2)), None
    return plain, [side for v in reversed(total) for side in (v // 2, v - v // 2)]


def pair(value: Any) -> Pair:
    """Return one number for both directions, or two, as a pair."""
    height, width = value if isinstance(value, tuple | list) else (value, value)
    return int(height), int(width)


def _batch_norm(part: Part) -> Swap:
    weight, bias = part.parameter("weight"), part.parameter("bias")
    momentum, eps, fixed = part.module.momentum, part.module.eps, part.fixed_statistics
    name = part.name if part.module.running_mean is not None else None

    def forward(x: Tensor) -> Tensor:
        params, fwd = CURRENT.params, CURRENT.fwd
        if fixed:
            fwd = replace(fwd, batch_statistics=False)
        return ops.batch_norm(
            x, fwd, params[weight] if weight else None, params[bias] if bias else None,
            name, momentum, eps,
        )  # fmt: skip

    return Swap(forward, part.names)


def _dropout(part: Part) -> Swap:
    rate = part.module.p
    return Swap(lambda x: ops.dropout(x, rate, CURRENT.fwd))


def _channel_dropout(part: Part) -> Swap:
    rate = part.module.p
    return Swap(lambda x: channel_dropout(x, rate, CURRENT.fwd))


def channel_dropout(x: Tensor, rate: float, fwd: ForwardPass) -> Tensor:
    """Zero whole channels of x [batch, channels, ...] with probability `rate`, while training."""
    if not fwd.train or rate == 0 or fwd.key is None:
        return x
    shape = (*x.shape[:2], *[1] * (x.dim() - 2))
    return x * ops.dropout(x.new_ones(shape), rate, fwd)


def _layer_norm(part: Part) -> Swap:
    shape, eps = part.module.normalized_shape, part.module.eps
    weight, bias = part.parameter("weight"), part.parameter("bias")

    def forward(x: Tensor) -> Tensor:
        params = CURRENT.params
        scale, shift = params[weight] if weight else None, params[bias] if bias else None
        return F.layer_norm(x, shape, scale, shift, eps)

    return Swap(forward, part.names)


def _group_norm(part: Part) -> Swap:
    groups, eps = part.module.num_groups, part.module.eps
    weight, bias = part.parameter("weight"), part.parameter("bias")

    def forward(x: Tensor) -> Tensor:
        params = CURRENT.params
        scale, shift = params[weight] if weight else None, params[bias] if bias else None
        return ops.group_norm(x, groups, scale, shift, CURRENT.fwd, eps)

    return Swap(forward, part.names)


SWAPS: dict[type[nn.Module], Callable[[Part], Swap | None]] = {
    nn.Linear: _linear,
    nn.Conv2d: _conv,
    **dict.fromkeys(BATCH_NORMS, _batch_norm),
    nn.Dropout: _dropout,
    **dict.fromkeys((nn.Dropout1d, nn.Dropout2d, nn.Dropout3d), _channel_dropout),
    nn.LayerNorm: _layer_norm,
    nn.GroupNorm: _group_norm,
}
"""Replacements by the exact type of a module."""
