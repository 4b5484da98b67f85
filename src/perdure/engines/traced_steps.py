"""One local step of a stack of clients, as a function of tensors alone.

The loss of one client is lifted over a leading client axis by torch.func.vmap, differentiated by
autograd (the sum of the clients' losses has each client's gradient in its own slice), and the whole
step is traced once per shape, so that later steps run the recorded tensor operations without the
cost of vmap and autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from perdure.contract.exchanges import Prepared
from perdure.contract.local_training import LocalTraining
from perdure.contract.step import Batch
from perdure.core.trees import Tensors
from perdure.engines.stacked_transforms import Leaves, StackedTransforms, float_fields

_TRACE_AFTER = 2
"""A shape is traced when it has come this often: tracing costs about as much as 30 steps."""
_LIFT_AFTER = 3
"""Different values of a transform's floats after which they are no constants of a trace."""

StackedStep = Callable[..., tuple[list[Tensor], Tensors]]


class TracedSteps:
    """Lifted steps, traced once per shape that comes often.

    A loss depends on its arguments alone, and its Python code on their names and shapes alone (it
    has no `if` on a tensor's value): a trace serves in all tasks in which these are the same.
    """

    def __init__(self) -> None:
        self.lift: frozenset[type] = frozenset()
        """Kinds of transforms whose floats change from round to round."""
        self._values: dict[type, set[Any]] = {}
        self._bodies: dict[int, Any] = {}
        self._numbers: dict[Any, int] = {}
        self._seen: dict[tuple[int, int], int] = {}
        """How often each shape has come in this task."""
        self._traced: dict[tuple[int, int], StackedStep] = {}
        self._task = -1

    def for_stack(self, training: LocalTraining, transforms: StackedTransforms) -> StackTracer:
        """Return the steps of one stack. Shapes that the last task had no use for are dropped."""
        if training.context.task != self._task:
            self._traced = {key: step for key, step in self._traced.items() if key in self._seen}
            self._seen, self._task = {}, training.context.task
        for transform in transforms.templates:
            values = self._values.setdefault(type(transform), set())
            values.add(float_fields(transform))
            if len(values) >= _LIFT_AFTER:
                self.lift |= {type(transform)}
        return StackTracer(self, training, transforms)

    def kept(self, body: Any) -> int:
        """Return what tells one network's body from others; it is kept alive, so that it stays."""
        self._bodies[id(body)] = body
        return id(body)

    def number(self, key: Any) -> int:
        """Return a small number that stands for everything but the width of a stack."""
        return self._numbers.setdefault(key, len(self._numbers))

    def run(self, key: tuple[int, int], step: Callable[[], StackedStep], inputs: Any) -> Any:
        """Run a step: as it is at first, traced when its shape has come often."""
        seen = self._seen[key] = self._seen.get(key, 0) + 1
        if key not in self._traced:
            if seen <= _TRACE_AFTER:
                return step()(*inputs)
            self._traced[key] = trace(step(), inputs)
        with torch.no_grad():
            return self._traced[key](*inputs)


class StackTracer:
    """The steps of one stack. Within it shapes depend on the width alone."""

    def __init__(
        self, traced: TracedSteps, training: LocalTraining, transforms: StackedTransforms
    ) -> None:
        self._traced, self._work, self._transforms = traced, training, transforms
        self._shared = {"broadcast": training.broadcast, "transforms": transforms.shared}
        self._number: int | None = None

    def run(
        self, params: Tensors, arguments: dict[str, Any], width: int
    ) -> tuple[list[Tensor], Tensors]:
        """Return gradients (in the order of params) and new running statistics of one step."""
        if self._number is None:
            self._number = self._traced.number(self._key(params, arguments, width))
        inputs = (params, self._shared, arguments)
        step = lambda: stacked_step(self._work, self._transforms)  # noqa: E731
        result: tuple[list[Tensor], Tensors] = self._traced.run((self._number, width), step, inputs)
        return result

    def _key(self, params: Tensors, arguments: dict[str, Any], width: int) -> Any:
        training = self._work
        train, network, config = training.train, training.context.network, training.config
        code = (train.extra_rows, train.loss, train.penalty, train.batch_statistics)
        settings = (config.coupled_decay, config.clip, config.batch_size, training.fast)
        model = (self._traced.kept(network.body), network.outputs.kind, training.trainable)
        shapes = (_shapes(self._shared), _shapes((params, arguments)), width)
        return code, settings, model, self._transforms.settings, shapes


def _shapes(tree: Any) -> Any:
    leaves, form = tree_flatten(tree)
    return form, tuple((leaf.shape, leaf.dtype) for leaf in leaves)


def trace(step: StackedStep, inputs: tuple[Any, ...]) -> StackedStep:
    """Return the tensor operations of a step, recorded on these inputs.

    The recording knows an input by its object. Where two are one (a teacher that is the model as it
    was received), it would take them for one for good; so each gets an object of its own.
    """
    from torch.fx.experimental.proxy_tensor import make_fx  # takes a second to import

    apart = tree_map(lambda leaf: leaf if leaf is None else leaf.detach(), inputs)
    recorded: StackedStep = make_fx(step)(*apart)
    return recorded


def stacked_step(training: LocalTraining, transforms: StackedTransforms) -> StackedStep:
    """Return one step of a stack of clients as a function of tensors alone."""

    def step(
        params: Tensors, shared: Any, arguments: dict[str, Any]
    ) -> tuple[list[Tensor], Tensors]:
        leaves = {name: p.detach().requires_grad_() for name, p in params.items()}
        losses, updates = torch.vmap(_loss(training, transforms, shared))(leaves, arguments)
        grads = torch.autograd.grad(losses.sum(), list(leaves.values()), materialize_grads=True)
        named = dict(zip(leaves, grads, strict=True))
        if training.changes_gradient(transforms.templates):
            change = torch.vmap(_transform_gradient(training, transforms, shared))
            named = change(named, params, arguments["transforms"])
        return list(named.values()), {name: value.detach() for name, value in updates.items()}

    return step


def _loss(
    training: LocalTraining, transforms: StackedTransforms, shared: Any
) -> Callable[..., tuple[Tensor, Tensors]]:
    def loss(params: Tensors, a: dict[str, Any]) -> tuple[Tensor, Tensors]:
        masks, cached = a.get("active_outputs"), a.get("cached_features")
        batch = Batch(a["x"], a["y"], a["mask"], masks, cached, a["epoch"])
        built = transforms.build(shared["transforms"], a["transforms"])
        local = Prepared(tensors=a["tensors"], transforms=built)
        return training.loss(
            params, a["buffers"], batch, a["key"], shared["broadcast"], local, stacked=True
        )

    return loss


def _transform_gradient(
    training: LocalTraining, transforms: StackedTransforms, shared: Any
) -> Callable[..., Tensors]:
    def change(grads: Tensors, params: Tensors, own: list[Leaves]) -> Tensors:
        built = transforms.build(shared["transforms"], own)
        return training.transform_gradient(grads, params, shared["broadcast"], built)

    return change
