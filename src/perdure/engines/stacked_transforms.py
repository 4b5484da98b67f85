"""The transforms of a stack of clients: tensors that all share, and tensors with a client axis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from perdure.contract.checks import refuse
from perdure.contract.transforms import ProjectOut, Transform
from perdure.core.trees import Tensors, pad_stack

Leaves = Tensors
"""Tensors of a transform by path: the names of its field and dict keys, joined by _SEPARATOR."""
_SEPARATOR = "|"


class StackedTransforms:
    """The transforms of the clients of a stack.

    A tensor that is the same object for all clients is shared; others are stacked and padded with
    zeros at the end. A float is a constant of the trace. It becomes a tensor if it differs between
    clients, or if its kind of transform is in `varying_floats`.

    Args:
        by_client: The transforms of each client.
        varying_floats: Kinds of transforms whose floats change from round to round.
    """

    def __init__(
        self, by_client: list[tuple[Transform, ...]], varying_floats: frozenset[type]
    ) -> None:
        self.templates = by_client[0]
        """The first client's transforms, from which those of the others differ in tensors only."""
        self.shared: list[Leaves] = []
        """Tensors of each transform that all clients share."""
        self.stacked: list[Leaves] = []
        """Tensors of each transform with a leading client axis."""
        for position, template in enumerate(self.templates):
            transforms = [client[position] for client in by_client]
            shared, stacked = _share_or_stack(transforms, type(template) in varying_floats)
            self.shared.append(shared)
            self.stacked.append(stacked)

        self.settings = tuple(
            (
                template.settings(),
                () if type(template) in varying_floats else float_fields(template),
            )
            for template in self.templates
        )
        """Everything that is constant in a trace."""

    def build(self, shared: list[Leaves], stacked: list[Leaves]) -> tuple[Transform, ...]:
        """Return the transforms of one client (under vmap).

        Args:
            shared: Tensors of each transform that all clients share.
            stacked: Tensors of each transform of this client.
        """
        leaves = zip(self.templates, shared, stacked, strict=True)
        return tuple(
            _with_leaves(template, common | per_client) for template, common, per_client in leaves
        )


def float_fields(transform: Transform) -> tuple[tuple[str, float], ...]:
    """Return the fields that are floats, with their values."""
    values = ((f.name, getattr(transform, f.name)) for f in fields(transform))
    return tuple((name, value) for name, value in values if isinstance(value, float))


NO_TRANSFORMS = StackedTransforms([()], frozenset())
"""The transforms of clients that have none."""


def _share_or_stack(transforms: list[Transform], varying: bool) -> tuple[Leaves, Leaves]:
    first = transforms[0]
    equal = {
        name: torch.tensor(value, dtype=torch.float64)  # which rounds as a float does
        for name, value in float_fields(first)
        if all(getattr(transform, name) == value for transform in transforms)
    }
    shared: Leaves = equal if varying else {}
    if all(transform is first for transform in transforms):
        return shared | {path: v for path, v in _leaves(first).items() if path not in equal}, {}
    if isinstance(first, ProjectOut):
        transforms = _same_form(transforms)
    by_client = [{p: v for p, v in _leaves(t).items() if p not in equal} for t in transforms]
    stacked: Leaves = {}
    for path in {path: None for leaves in by_client for path in leaves}:
        values = [leaves.get(path) for leaves in by_client]
        present = next(value for value in values if value is not None)
        if all(value is present for value in values):
            shared[path] = present
        else:
            stacked[path] = _stack_leaf(first, path, values, present)
    return shared, stacked


def _leaves(transform: Transform) -> Leaves:
    leaves: Leaves = {}
    for f in fields(transform):
        _collect(getattr(transform, f.name), f.name, leaves)
    return leaves


def _collect(value: Any, path: str, leaves: Leaves) -> None:
    if isinstance(value, Tensor):
        leaves[path] = value
    elif isinstance(value, float):
        leaves[path] = torch.tensor(value)
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            _collect(inner, f"{path}{_SEPARATOR}{key}", leaves)


def _with_leaves(template: Transform, leaves: Leaves) -> Transform:
    """Return a copy of a transform with these tensors in its fields."""
    tree: dict[str, Any] = {}
    for path, value in leaves.items():
        *parents, last = path.split(_SEPARATOR)
        branch = tree
        for key in parents:
            branch = branch.setdefault(key, {})
        branch[last] = value
    return replace(template, **tree)


def _stack_leaf(
    first: Transform, path: str, values: list[Tensor | None], present: Tensor
) -> Tensor:
    if any(value is None for value in values) and not first.zero_is_neutral:
        name = path.split(_SEPARATOR)[1]
        refuse(f"transform {type(first).__name__}", f"{name!r} for some clients only",
               "a transform of the same parameters for all clients")  # fmt: skip
    empty = present.new_zeros([0] * present.dim())
    stack = pad_stack([empty if value is None else value for value in values])
    is_basis = isinstance(first, ProjectOut) and path.endswith(f"{_SEPARATOR}basis")
    return _round_up_rank(stack) if is_basis else stack


def _round_up_rank(stack: Tensor) -> Tensor:
    """Add zero columns up to a multiple of an eighth of the space, so that few shapes occur."""
    size, rank = stack.shape[-2:]
    step = max(1, size // 8)
    width = min(size, -(-max(rank, 1) // step) * step)
    return pad(stack, (0, max(0, width - rank)))


def _same_form(transforms: list[Any]) -> list[Transform]:
    """Return projections whose subspaces are all bases, or all projectors if forms are mixed."""
    forms: dict[str, set[str]] = {}
    sizes: dict[str, int] = {}
    for transform in transforms:
        for name, subspace in transform.subspaces.items():
            forms.setdefault(name, set()).update(subspace)
            sizes[name] = len(next(iter(subspace.values())))
    mixed = [name for name, kinds in forms.items() if kinds != {"basis"}]
    return [replace(t, subspaces=_as_projectors(t.subspaces, mixed, sizes)) for t in transforms]


def _as_projectors(
    subspaces: dict[str, Tensors], names: list[str], sizes: dict[str, int]
) -> dict[str, Tensors]:
    projectors = {name: _projector(subspaces.get(name), sizes[name]) for name in names}
    return subspaces | {name: {"projector": value} for name, value in projectors.items()}


def _projector(subspace: Tensors | None, size: int) -> Tensor:
    if subspace is None:
        return torch.eye(size)
    ((form, matrix),) = subspace.items()
    if form == "projector":
        return matrix
    onto = matrix @ matrix.T
    return torch.eye(size, device=matrix.device) - onto if form == "basis" else onto
