"""The state of a module besides its parameters, to notice what a call changes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_INTERNAL = ("_parameters", "_buffers", "_modules", "training")
_COUNTERS = "num_batches_tracked"


def module_state(module: nn.Module) -> dict[str, Any]:
    """Return the attributes and buffers of a module and its parts, by path."""
    state: dict[str, Any] = {}
    for path, part in module.named_modules():
        values = {key: v for key, v in vars(part).items() if key not in _INTERNAL}
        buffers = {key: v for key, v in part._buffers.items() if key != _COUNTERS}
        for key, value in (values | buffers).items():
            state[f"{path}.{key}".lstrip(".")] = _snapshot(value)
    return state


def _snapshot(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, list | tuple | dict | set):
        return len(value)
    return value if isinstance(value, int | float | str | bool) else type(value)


def changed_state(before: dict[str, Any], after: dict[str, Any]) -> str | None:
    """Return the path of the first value that changed, or None."""
    return next((path for path in after if not _same(before.get(path), after[path])), None)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and bool(torch.equal(a, b))
    return type(a) is type(b) and bool(a == b)
