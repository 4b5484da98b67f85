"""One local step of a stack of clients, and its transforms, as a traced function of tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils._pytree import tree_flatten, tree_map

from perdure.contract.exchanges import Prepared
from perdure.contract.step import Batch
from perdure.contract.transforms import ProjectOut, Transform
from perdure.core.errors import refuse
from perdure.core.trees import Tensors, pad_stack
from perdure.training.local_training import LocalTraining

# ---- The transforms of a stack of clients: tensors that all share, and tensors with a client axis.

Leaves = Tensors
"""Tensors of a transform by path: the names of its field and dict keys, joined by _SEPARATOR."""
_SEPARATOR = "|"


class StackedTransforms:
    """The transforms of the clients of a stack.

    A tensor that is the same object for all clients is shared; others are stacked and padded with
    zeros at the end. A float is a constant of the trace. It becomes a tensor if it differs between
    clients, or if its kind of transform is in `varying_floats`.
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
        """Return the transforms of one client (under vmap)."""
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


# ---- One local step of a stack of clients, as a traced function of tensors
#
# The loss of one client is computed for all clients of a stack by torch.vmap and differentiated by
# autograd (in the gradient of the sum of all losses, each row is one client's gradient). The whole
# step is traced once per shape, so that later steps run the recorded tensor operations without the
# cost of vmap and autograd.

_TRACE_AFTER = 2
"""Untraced steps of a shape before it is traced, since tracing takes as long as about 30 steps."""
_MAX_CONSTANT_VALUES = 3
"""Number of different values of a transform's floats from which on they are passed as tensors."""

StackedStep = Callable[..., tuple[list[Tensor], Tensors, Tensor]]
"""Returns the gradients, new running statistics and losses [clients] of one step of a stack."""


class TracedSteps:
    """Steps of stacks, each shape of which is traced once it has occurred a few times.

    A loss depends only on its arguments, and its Python code only on their names and shapes (it has
    no `if` on a tensor's value), so a trace can be reused in all tasks with the same names and
    shapes.
    """

    def __init__(self) -> None:
        self.varying_floats: frozenset[type] = frozenset()
        """Kinds of transforms whose floats change from round to round."""
        self._float_values: dict[type, set[Any]] = {}
        self._bodies: dict[int, Any] = {}
        self._key_numbers: dict[Any, int] = {}
        self._seen: dict[tuple[int, int], int] = {}
        """Steps of each shape in this task."""
        self._traced: dict[tuple[int, int], StackedStep] = {}
        self._task = -1

    def for_stack(self, training: LocalTraining, transforms: StackedTransforms) -> StackTracer:
        """Return the steps of one stack. Traces that the previous task did not use are dropped."""
        if training.context.task != self._task:
            self._traced = {key: step for key, step in self._traced.items() if key in self._seen}
            self._seen, self._task = {}, training.context.task
        for transform in transforms.templates:
            values = self._float_values.setdefault(type(transform), set())
            values.add(float_fields(transform))
            if len(values) >= _MAX_CONSTANT_VALUES:
                self.varying_floats |= {type(transform)}
        return StackTracer(self, training, transforms)

    def body_id(self, body: Any) -> int:
        """Return a number that identifies a network's body, which is kept alive."""
        self._bodies[id(body)] = body
        return id(body)

    def key_number(self, key: Any) -> int:
        """Return a small number for a key, the same for equal keys."""
        return self._key_numbers.setdefault(key, len(self._key_numbers))

    def run(self, key: tuple[int, int], step: Callable[[], StackedStep], inputs: Any) -> Any:
        """Run a step: directly at first, as a trace once its shape has occurred a few times."""
        seen = self._seen[key] = self._seen.get(key, 0) + 1
        if key not in self._traced:
            if seen <= _TRACE_AFTER:
                return step()(*inputs)
            self._traced[key] = trace(step(), inputs)
        with torch.no_grad():
            return self._traced[key](*inputs)


class StackTracer:
    """The steps of one stack, whose shapes depend only on the number of clients (the width)."""

    def __init__(
        self, traced: TracedSteps, training: LocalTraining, transforms: StackedTransforms
    ) -> None:
        self._traced, self._training, self._transforms = traced, training, transforms
        self._shared = {"broadcast": training.broadcast, "transforms": transforms.shared}
        self._key_number: int | None = None

    def run(
        self, params: Tensors, arguments: dict[str, Any], width: int
    ) -> tuple[list[Tensor], Tensors, Tensor]:
        """Return gradients in the order of `params`, new statistics and losses of a step."""
        if self._key_number is None:
            self._key_number = self._traced.key_number(self._key(params, arguments, width))
        inputs = (params, self._shared, arguments)
        step = lambda: stacked_step(self._training, self._transforms)  # noqa: E731
        result: tuple[list[Tensor], Tensors, Tensor] = self._traced.run(
            (self._key_number, width), step, inputs
        )
        return result

    def _key(self, params: Tensors, arguments: dict[str, Any], width: int) -> Any:
        training = self._training
        train, network, config = training.train, training.context.network, training.train_config
        code = (train.extra_rows, train.loss, train.penalty, train.batch_statistics)
        settings = (training.decay, config.clip, config.batch_size, training.fast)
        model = (self._traced.body_id(network.body), network.outputs.kind, training.trainable)
        shapes = (_shapes(self._shared), _shapes((params, arguments)), width)
        return code, settings, model, self._transforms.settings, shapes


def _shapes(tree: Any) -> Any:
    leaves, structure = tree_flatten(tree)
    return structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)


def trace(step: StackedStep, inputs: tuple[Any, ...]) -> StackedStep:
    """Return the tensor operations of a step, recorded on these inputs.

    make_fx identifies inputs by object. If two inputs were the same object (such as a teacher that
    is the received model), the trace would always treat them as one; so each input is detached into
    a separate object.
    """
    from torch.fx.experimental.proxy_tensor import make_fx  # takes about a second to import

    separate = tree_map(lambda leaf: leaf if leaf is None else leaf.detach(), inputs)
    recorded: StackedStep = make_fx(step)(*separate)
    return recorded


def stacked_step(training: LocalTraining, transforms: StackedTransforms) -> StackedStep:
    """Return one step of a stack of clients as a function of tensors."""

    def step(
        params: Tensors, shared: Any, arguments: dict[str, Any]
    ) -> tuple[list[Tensor], Tensors, Tensor]:
        leaves = {name: p.detach().requires_grad_() for name, p in params.items()}
        losses, updates = torch.vmap(_loss(training, transforms, shared))(leaves, arguments)
        grads = torch.autograd.grad(losses.sum(), list(leaves.values()), materialize_grads=True)
        named = dict(zip(leaves, grads, strict=True))
        if training.changes_raw_gradient(transforms.templates):
            transform = torch.vmap(_decay_transform_clip(training, transforms, shared))
            named = transform(named, params, arguments["transforms"])
        new_buffers = {name: value.detach() for name, value in updates.items()}
        return list(named.values()), new_buffers, losses.detach()

    return step


def _loss(
    training: LocalTraining, transforms: StackedTransforms, shared: Any
) -> Callable[..., tuple[Tensor, Tensors]]:
    def loss(params: Tensors, a: dict[str, Any]) -> tuple[Tensor, Tensors]:
        active, cached = a.get("active_outputs"), a.get("cached_features")
        batch = Batch(a["x"], a["y"], a["mask"], active, cached, a["epoch"])
        client_transforms = transforms.build(shared["transforms"], a["transforms"])
        local = Prepared(tensors=a["tensors"], transforms=client_transforms)
        return training.loss(
            params, a["buffers"], batch, a["key"], shared["broadcast"], local, stacked=True
        )

    return loss


def _decay_transform_clip(
    training: LocalTraining, transforms: StackedTransforms, shared: Any
) -> Callable[..., Tensors]:
    def transform(grads: Tensors, params: Tensors, stacked: list[Leaves]) -> Tensors:
        client_transforms = transforms.build(shared["transforms"], stacked)
        return training.decay_transform_clip(grads, params, shared["broadcast"], client_transforms)

    return transform
