"""Transforms: changes of every local step as values, applied where the engine finds it cheapest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from perdure.algebra.subspaces import project_out
from perdure.core.errors import check_name, refuse, type_name
from perdure.core.trees import Tensors


@dataclass(frozen=True)
class Transform:
    """A change of every local step of a client.

    The fields of a transform are tensors by parameter name, numbers, strings and None. Its
    functions are pure and run under vmap; parameters that it does not name are unchanged. All
    clients of a round must have the same kinds of transforms in the same order.
    """

    tensor_fields: ClassVar[tuple[str, ...]] = ()
    """Names of the fields that are dicts of one tensor per parameter, of the parameter's shape."""

    @property
    def zero_is_neutral(self) -> bool:
        """Whether zeros change nothing, so that they can stand for a parameter a client lacks."""
        return True

    def on_gradient(self, grads: Tensors, params: Tensors) -> Tensors:
        """Return the gradient for the optimizer.

        Args:
            grads: Gradients of the trained parameters, with weight decay.
            params: All parameters.

        """
        return grads

    def on_step(self, params: Tensors, before: Tensors, lr: float) -> Tensors:
        """Return the trained parameters after the optimizer's step.

        Args:
            params: The trained parameters as the optimizer left them.
            before: The trained parameters before the step.
            lr: Learning rate of the step.

        """
        return params

    def acts_on_gradient(self) -> bool:
        """Return whether `on_gradient` does anything."""
        return type(self).on_gradient is not Transform.on_gradient

    def acts_on_step(self, sums_gradients: bool) -> bool:
        """Return whether `on_step` does anything.

        Args:
            sums_gradients: Whether the optimizer's steps are sums of gradients, as those of sgd.

        """
        return type(self).on_step is not Transform.on_step

    def check(self, parameters: Mapping[str, torch.Size]) -> None:
        """Refuse names and shapes that the model does not have."""
        for name in self.tensor_fields:
            values = getattr(self, name) or {}
            check_tensors(f"transform {type(self).__name__}", values, parameters)

    def settings(self) -> tuple[Any, ...]:
        """Return everything but tensors and floats, which must be the same for all clients."""
        values = [(f.name, getattr(self, f.name)) for f in fields(self)]
        return (type(self), *((name, _setting(value)) for name, value in values))


def _setting(value: Any) -> Any:
    if isinstance(value, Tensor | Mapping | float):
        return type(value).__name__
    if value is None or isinstance(value, bool | int | str):
        return value
    refuse(
        "transform",
        f"a field of type {type(value).__name__}",
        "made of fields that are tensors, numbers or strings",
    )


@dataclass(frozen=True)
class Proximal(Transform):
    """Pull the parameters towards an anchor: (strength / 2) sum_i c_i (w_i - a_i)^2.

    The gradient strength (c w - c a) is added to the loss gradient. If `implicit`, the step is
    followed by the proximal map w <- (w + lr strength c a) / (1 + lr strength c) instead.
    """

    towards: Tensors
    """c a by parameter name; without a curvature the anchor a itself."""
    strength: float
    """Weight of the pull."""
    curvature: Tensors | None = None
    """c by parameter name. If None, 1 for every name of `towards`."""
    implicit: bool = False
    """Whether to apply the proximal map after the step instead of adding to the gradient."""

    tensor_fields: ClassVar[tuple[str, ...]] = ("towards", "curvature")

    @property
    def zero_is_neutral(self) -> bool:
        """Whether there is a curvature; without one, zeros would pull towards zero."""
        return self.curvature is not None

    def acts_on_gradient(self) -> bool:
        """Return whether the pull is added to the gradient."""
        return not self.implicit

    def acts_on_step(self, sums_gradients: bool) -> bool:
        """Return whether the proximal map is applied after the step."""
        return self.implicit

    def on_gradient(self, grads: Tensors, params: Tensors) -> Tensors:
        """Return the gradient plus strength (c w - c a)."""
        if self.implicit:
            return grads
        return {name: self._with_pull(name, g, params) for name, g in grads.items()}

    def _with_pull(self, name: str, grad: Tensor, params: Tensors) -> Tensor:
        if name not in self.towards:
            return grad
        value = params[name] if self.curvature is None else self.curvature[name] * params[name]
        return grad + self.strength * (value - self.towards[name])

    def on_step(self, params: Tensors, before: Tensors, lr: float) -> Tensors:
        """Return the proximal map of the parameters."""
        if not self.implicit:
            return params
        return {
            name: self._proximal_map(name, value, lr * self.strength)
            for name, value in params.items()
        }

    def _proximal_map(self, name: str, value: Tensor, weight: float) -> Tensor:
        if name not in self.towards:
            return value
        curvature = 1 if self.curvature is None else self.curvature[name]
        return (value + weight * self.towards[name]) / (1 + weight * curvature)


@dataclass(frozen=True)
class AddToGradient(Transform):
    """Add values to the gradient, such as control variates: g <- g + values."""

    values: Tensors
    """Added values by parameter name."""

    tensor_fields: ClassVar[tuple[str, ...]] = ("values",)

    def on_gradient(self, grads: Tensors, params: Tensors) -> Tensors:
        """Return the gradient plus the values."""
        return {n: g + self.values[n] if n in self.values else g for n, g in grads.items()}


@dataclass(frozen=True)
class ProjectOut(Transform):
    """Project every step of a weight out of a subspace of its layer's inputs: D <- D - D O O^T.

    With SGD it is enough to project gradients, since steps are sums of them. Adaptive optimizers
    scale each entry, so their steps are projected as well.
    """

    subspaces: dict[str, Tensors]
    """By weight name a subspace of the layer's inputs, as `algebra.subspaces.Subspace.tree`
    returns it."""
    broadcast: bool = False
    """Whether the subspaces are the same for all clients; set by the engine."""

    def on_gradient(self, grads: Tensors, params: Tensors) -> Tensors:
        """Return the projected gradients."""
        return project_out_all(grads, self.subspaces)

    def on_step(self, params: Tensors, before: Tensors, lr: float) -> Tensors:
        """Return the parameters after the projected step."""
        steps = {n: params[n] - before[n] for n in params if n in self.subspaces}
        projected = project_out_all(steps, self.subspaces)
        return params | {n: before[n].add(value) for n, value in projected.items()}

    def acts_on_step(self, sums_gradients: bool) -> bool:
        """Return whether the optimizer's steps are not sums of gradients."""
        return not sums_gradients

    def check(self, parameters: Mapping[str, torch.Size]) -> None:
        """Refuse subspaces of other weights, or of another input size."""
        where = f"transform {type(self).__name__}"
        for name, subspace in self.subspaces.items():
            check_name(where, name, parameters)
            size, basis = parameters[name][1:].numel(), next(iter(subspace.values()))
            if basis.shape[0] != size:
                got = f"a basis of {basis.shape[0]} rows"
                refuse(
                    f"{where}: {name!r}", got, f"a basis of {size} rows, the inputs of the weight"
                )


def project_out_all(changes: Tensors, subspaces: Mapping[str, Tensors]) -> Tensors:
    """Return changes of weights, projected out of protected subspaces: D <- D - (D O) O^T.

    Args:
        changes: Gradients or steps by parameter name.
        subspaces: Protected subspaces by weight name; other parameters are unchanged.

    """
    return {
        name: project_out_weight(value, subspaces[name]) if name in subspaces else value
        for name, value in changes.items()
    }


def project_out_weight(change: Tensor, subspace: Tensors) -> Tensor:
    """Return one projected change; a convolution is treated as the matrix out x (c * h * w)."""
    if change.dim() == 2:
        return project_out(change, subspace)
    matrix = change.reshape(change.shape[0], -1)
    return project_out(matrix, subspace).reshape(change.shape)


def check_tensors(where: str, values: Any, allowed: Mapping[str, torch.Size]) -> None:
    """Refuse values that are not tensors with the names and shapes of `allowed`.

    Args:
        where: The function of the method that returned the values.
        values: Any value. Only a dict of tensors is accepted; it may lack some of the names.
        allowed: Shapes by name.

    """
    if not isinstance(values, Mapping):
        refuse(where, type_name(values), "a dict of tensors by parameter name")
    for name, value in values.items():
        if name not in allowed:
            check_name(where, name, allowed)
        if not isinstance(value, Tensor):
            refuse(f"{where}: {name!r}", type_name(value), "a tensor")
        if value.shape != allowed[name]:
            shape = list(allowed[name])
            refuse(f"{where}: {name!r}", f"shape {list(value.shape)}", f"of shape {shape}")
