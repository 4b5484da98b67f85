"""Whether clients with separate parameters can be computed as one stack."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from perdure.core.trees import Tensors
from perdure.models.forward_pass import ForwardPass

_TOLERANCE = 1e-6
_PADDING = 2

Features = Callable[[Tensors, Tensor, ForwardPass], Tensor]


def why_not_stacked(
    features: Features, params: Tensors, buffers: Tensors, rows: Tensor
) -> str | None:
    """Return why two clients cannot be stacked, or None if they can.

    The stack has padding and dropout, and is compared with one client after the other.

    Args:
        features: Returns the features of a batch.
        params: Parameters in double precision.
        buffers: Running statistics in double precision.
        rows: A few inputs; the last ones are used as padding.
    """
    clients = [params, {name: value * 1.01 for name, value in params.items()}]
    real = len(rows) - _PADDING
    mask = (torch.arange(len(rows)) < real).double()

    def stacked(leaves: Tensors, x: Tensor) -> Tensor:
        return features(leaves, x, _pass(buffers, mask=mask, stacked=True))

    leaves = {
        name: torch.stack([client[name] for client in clients]).requires_grad_() for name in params
    }
    try:
        out: Any = torch.vmap(stacked)(leaves, rows.expand(len(clients), *rows.shape))
        if leaves:
            torch.autograd.grad(out.sum(), list(leaves.values()), allow_unused=True)
    except Exception as error:  # whatever the module's code does under vmap
        return str(error).splitlines()[0] if str(error) else type(error).__name__
    with torch.no_grad():
        alone = torch.stack([features(client, rows[:real], _pass(buffers)) for client in clients])
    if not torch.allclose(out[:, :real], alone, _TOLERANCE, _TOLERANCE, equal_nan=True):
        return "its stacked values, with padding and dropout, differ from those of single clients"
    return None


def _pass(buffers: Tensors, mask: Tensor | None = None, stacked: bool = False) -> ForwardPass:
    return ForwardPass(
        train=True, buffers=buffers, batch_statistics=True, key=torch.tensor(1), mask=mask,
        stacked=stacked,
    )  # fmt: skip
