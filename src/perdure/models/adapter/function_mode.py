"""Replace functions of PyTorch while a module is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from perdure.models.adapter import attention, functions

OnCall = Callable[[Any, tuple[Any, ...], dict[str, Any]], None]

RULES: dict[Any, Callable[..., Any]] = {
    F.linear: functions.linear,
    torch.conv2d: functions.conv2d,
    torch.conv1d: functions.conv1d,
    F.batch_norm: functions.batch_norm,
    F.dropout: functions.dropout,
    torch.dropout: functions.dropout,
    **dict.fromkeys((F.dropout1d, F.dropout2d, F.dropout3d), functions.dropout_of_channels),
    F.group_norm: functions.group_norm,
    Tensor.bernoulli_: functions.bernoulli_,
    F.scaled_dot_product_attention: attention.scaled_dot_product_attention,
    F.multi_head_attention_forward: attention.multi_head_attention,
}
"""Replacements by function."""


class FunctionMode(TorchFunctionMode):
    """Replaces functions by `RULES` while it is active.

    Args:
        on_call: Called with every function and its arguments, replaced or not.
    """

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
