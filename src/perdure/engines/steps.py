"""One local step of a stack of clients, as a function of tensors alone.

The loss of one client is lifted over a leading client axis by torch.func.vmap, differentiated by
autograd (the sum of the clients' losses has each client's gradient in its own slice), and the whole
step is traced once for each shape, so that later steps run the recorded tensor operations without
the cost of vmap and autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from perdure.config import TrainConfig
from perdure.engines.work import Job
from perdure.methods.base import Batch, Method
from perdure.models.network import Network
from perdure.trees import Tensors

_TRACE_AFTER = 2
"""A shape is traced when it has come this often: tracing costs about as much as 30 steps."""

Lifted = Callable[..., tuple[list[Tensor], Tensors]]


class Steps:
    """Lifted steps, traced once for each shape that comes often.

    A loss depends on its arguments alone, and its Python code on their names and shapes alone (it
    has no `if` on a tensor's value): a trace serves in all tasks in which these are the same.
    """

    def __init__(self) -> None:
        self._seen: dict[Any, int] = {}
        """How often each shape has come in this task."""
        self._traced: dict[Any, Lifted] = {}
        self._made_for: tuple[Method, TrainConfig, Network] | None = None
        self._task = 0

    def run(
        self, job: Job, params: Tensors, arguments: dict[str, Any]
    ) -> tuple[list[Tensor], Tensors]:
        """Gradients (in the order of params) and new running statistics of one stacked step."""
        self._begin(job)
        inputs = (params, job.received, arguments)
        leaves, form = tree_flatten(inputs)
        shapes = tuple(None if leaf is None else (leaf.shape, leaf.dtype) for leaf in leaves)
        key = (job.batch_statistics, form, shapes)
        seen = self._seen[key] = self._seen.get(key, 0) + 1
        if key not in self._traced:
            if seen <= _TRACE_AFTER:
                return lifted_step(job)(*inputs)
            self._traced[key] = trace(lifted_step(job), inputs)
        with torch.no_grad():
            return self._traced[key](*inputs)

    def _begin(self, job: Job) -> None:
        """At a new task, forget what the one before had no use for: shapes may grow with tasks."""
        task, made_for = job.place.task, (job.method, job.train, job.place.network)
        if self._made_for is None or not _alike(made_for, self._made_for):
            self._seen, self._traced, self._made_for, self._task = {}, {}, made_for, task
        elif task != self._task:
            self._traced = {key: step for key, step in self._traced.items() if key in self._seen}
            self._seen, self._task = {}, task


def _alike(
    one: tuple[Method, TrainConfig, Network], other: tuple[Method, TrainConfig, Network]
) -> bool:
    """Whether steps are the same: equal settings, and the very same network."""
    return one[:2] == other[:2] and one[2] is other[2]


def trace(step: Lifted, inputs: tuple[Any, ...]) -> Lifted:
    """The tensor operations of a step, recorded on these inputs.

    The recording knows an input by its object. Where two are one (a teacher that is the model as it
    was received), it would take them for one for good; so each gets an object of its own.
    """
    from torch.fx.experimental.proxy_tensor import make_fx  # costs a second, paid by who traces

    apart = tree_map(lambda leaf: leaf if leaf is None else leaf.detach(), inputs)
    recorded: Lifted = make_fx(step)(*apart)
    return recorded


def lifted_step(job: Job) -> Lifted:
    """One step of a stack of clients as a function of tensors alone."""

    def step(
        params: Tensors, received: Any, arguments: dict[str, Any]
    ) -> tuple[list[Tensor], Tensors]:
        leaves = {name: p.detach().requires_grad_() for name, p in params.items()}
        losses, updates = torch.vmap(_loss(job, received))(leaves, arguments)
        grads = torch.autograd.grad(losses.sum(), list(leaves.values()), materialize_grads=True)
        named = {name: g for name, g in zip(leaves, grads, strict=True)}
        if job.changes_gradient:
            named = torch.vmap(_direction(job, received))(named, params, arguments["own"])
        return list(named.values()), {name: value.detach() for name, value in updates.items()}

    return step


def _loss(job: Job, received: Any) -> Callable[..., tuple[Tensor, Tensors]]:
    def loss(params: Tensors, a: dict[str, Any]) -> tuple[Tensor, Tensors]:
        known, allowed = a.get("known"), a.get("allowed")
        batch = Batch(a["x"], a["y"], a["mask"], allowed, known, a["epoch"])
        return job.loss(params, a["buffers"], batch, a["key"], received, a["own"], lifted=True)

    return loss


def _direction(job: Job, received: Any) -> Callable[..., Tensors]:
    def direction(grads: Tensors, params: Tensors, own: Tensors) -> Tensors:
        return job.direction(grads, params, received, own)

    return direction
