"""The check that a server is finite, without which nothing of it is kept or saved."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from perdure.contract.context import Server
from perdure.contract.states import to_tree
from perdure.core.errors import RunError


def check_finite(before: Server, server: Server, where: str) -> None:
    """Refuse a server with a value that is not finite; values that did not change are skipped.

    Args:
        before: The server before the change.
        server: The server after it.
        where: The function that returned it, for the error message.

    Raises:
        RunError: A parameter, a buffer or a number of the state is not finite.
    """
    known = {id(value) for _, value in _leaves("", [before.params, before.buffers])}
    parts: dict[str, Any] = {"parameters": server.params, "buffers": server.buffers}
    if server.state is not before.state:
        known |= {id(value) for _, value in _leaves("", to_tree(before.state))}
        parts["state"] = to_tree(server.state)
    for name, value in _leaves("", parts):
        if id(value) not in known and not _is_finite(value):
            raise RunError(
                f"{where}: {name} of the server would not be finite; the run stops at its last "
                "checkpoint"
            )


def _leaves(name: str, tree: Any) -> Iterator[tuple[str, Any]]:
    """Yield the numbers and tensors of a tree with their names."""
    if isinstance(tree, dict | list):
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        for key, value in items:
            yield from _leaves(f"{name}/{key}" if name else str(key), value)
    elif isinstance(tree, Tensor | float):
        yield name, tree


def _is_finite(value: Tensor | float) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if not value.is_floating_point():
        return True
    # a finite sum has only finite terms and is checked faster; large terms may overflow it
    return bool(torch.isfinite(value.sum())) or bool(torch.isfinite(value).all())
