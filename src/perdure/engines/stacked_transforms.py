"""The transforms of many clients as one: what they share, and what has a client axis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from perdure.contract.checks import refuse
from perdure.contract.transforms import ProjectOut, Transform
from perdure.core.trees import Tensors

Leaves = Tensors
"""Tensors of a transform by path: the field's name and dict keys, joined by _SEPARATOR."""
_SEPARATOR = "|"


class StackedTransforms:
    """The transforms of the clients of a stack.

    A tensor that is one object for all clients is shared; others are stacked, padded with zeros at
    their end. A float is a constant of the trace, lifted to a tensor if clients differ in it, or
    for kinds of transforms in `lift`, whose floats change from round to round.
    """

    def __init__(self, rows: list[tuple[Transform, ...]], lift: frozenset[type]) -> None:
        self.templates = rows[0]
        self.shared: list[Leaves] = []
        self.stacked: list[Leaves] = []
        for position, like in enumerate(self.templates):
            shared, stacked = _merge([row[position] for row in rows], type(like) in lift)
            self.shared.append(shared)
            self.stacked.append(stacked)

        self.settings = tuple(
            (like.settings(), () if type(like) in lift else float_fields(like))
            for like in self.templates
        )
        """All that a trace takes for constant."""

    def build(self, shared: list[Leaves], stacked: list[Leaves]) -> tuple[Transform, ...]:
        """Return the transforms of one client (under vmap) from the leaves."""
        parts = zip(self.templates, shared, stacked, strict=True)
        return tuple(_with_leaves(like, mine | own) for like, mine, own in parts)


def float_fields(transform: Transform) -> tuple[tuple[str, float], ...]:
    """Return the fields that are floats."""
    values = ((f.name, getattr(transform, f.name)) for f in fields(transform))
    return tuple((name, value) for name, value in values if isinstance(value, float))


NO_TRANSFORMS = StackedTransforms([()], frozenset())


def _merge(transforms: list[Transform], lift: bool) -> tuple[Leaves, Leaves]:
    first = transforms[0]
    same = {name for name, value in float_fields(first)
            if not lift and all(getattr(t, name) == value for t in transforms)}  # fmt: skip
    if all(transform is first for transform in transforms):
        return {path: v for path, v in _leaves(first).items() if path not in same}, {}
    if isinstance(first, ProjectOut):
        transforms = _one_form(transforms)
    each = [{p: v for p, v in _leaves(t).items() if p not in same} for t in transforms]
    shared: Leaves = {}
    stacked: Leaves = {}
    for path in {path: None for leaves in each for path in leaves}:
        values = [leaves.get(path) for leaves in each]
        one = next(value for value in values if value is not None)
        if all(value is one for value in values):
            shared[path] = one
        else:
            stacked[path] = _stacked(first, path, values, one)
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


def _with_leaves(like: Transform, leaves: Leaves) -> Transform:
    """Return a transform like another one, with these tensors in its fields."""
    tree: dict[str, Any] = {}
    for path, value in leaves.items():
        *way, last = path.split(_SEPARATOR)
        here = tree
        for key in way:
            here = here.setdefault(key, {})
        here[last] = value
    return replace(like, **tree)


def _stacked(first: Transform, path: str, values: list[Tensor | None], one: Tensor) -> Tensor:
    if any(value is None for value in values) and not first.zero_is_neutral:
        name = path.split(_SEPARATOR)[1]
        refuse(f"transform {type(first).__name__}", f"{name!r} for some clients only",
               "the same parameters for all clients")  # fmt: skip
    none = one.new_zeros([0] * one.dim())
    stack = pad_stack([none if value is None else value for value in values])
    basis = isinstance(first, ProjectOut) and path.endswith(f"{_SEPARATOR}basis")
    return _few_widths(stack) if basis else stack


def _few_widths(stack: Tensor) -> Tensor:
    """Add zero columns up to a multiple of an eighth of the space, so that few shapes occur."""
    size, rank = stack.shape[-2:]
    step = max(1, size // 8)
    width = min(size, -(-max(rank, 1) // step) * step)
    return pad(stack, (0, max(0, width - rank)))


def _one_form(transforms: list[Any]) -> list[Transform]:
    """Return projections whose subspaces are bases; a mixture of forms becomes projectors."""
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
    whole = {name: {"projector": _projector(subspaces.get(name), sizes[name])} for name in names}
    return subspaces | whole


def _projector(subspace: Tensors | None, size: int) -> Tensor:
    if subspace is None:
        return torch.eye(size)
    ((kind, half),) = subspace.items()
    if kind == "projector":
        return half
    onto = half @ half.T
    return torch.eye(size, device=half.device) - onto if kind == "basis" else onto


def pad_stack(values: list[Tensor]) -> Tensor:
    """Stack tensors; smaller ones are padded with zeros at their end."""
    shape = [max(extents) for extents in zip(*(v.shape for v in values), strict=True)]
    stacked = values[0].new_zeros(len(values), *shape)
    for row, value in enumerate(values):
        corner = tuple(slice(extent) for extent in value.shape)
        stacked[row][corner] = value
    return stacked
