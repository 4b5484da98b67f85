"""Call the parts of a Sequential without the work that nn.Module.__call__ does for hooks.

It takes about a microsecond per part, a tenth of a small layer's forward pass.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

from torch import Tensor, nn

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def call_directly(module: nn.Module) -> None:
    """Replace the forward of each Sequential in a module whose parts have no hooks."""
    for part in module.modules():
        if type(part) is nn.Sequential and all(map(_has_plain_call, part)):
            replaced: Any = part
            replaced.forward = MethodType(_in_order, part)  # a deep copy binds it to its own


def _in_order(self: nn.Sequential, x: Tensor) -> Tensor:
    for part in self._modules.values():
        x = part.forward(x)
    return x


def _has_plain_call(part: nn.Module) -> bool:
    is_plain = type(part).__call__ is nn.Module.__call__ and part._compiled_call_impl is None
    return is_plain and not any(getattr(part, hooks) for hooks in _HOOKS)
