"""A network of this library as a body: a plain module, whose weights a run's generator draws."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor, nn

from perdure.core.trees import Tensors
from perdure.models.adapter.examination import Examination, outline
from perdure.models.adapter.module_body import ModuleBody
from perdure.models.layers import InitScheme


class BuiltinBody(ModuleBody):
    """A module of `perdure.models.modules`, which returns features.

    Tests have shown that it can be trained and stacked, so that it is not tried out: one call with
    zeros finds its layers.

    Args:
        module: The module, on the meta device, since its values are not used.
        shape: Shape of an input.
        scheme: Distribution of the initial weights.
    """

    def __init__(
        self, module: nn.Module, shape: tuple[int, ...], scheme: InitScheme = "uniform"
    ) -> None:
        self._scheme = scheme
        super().__init__(module, torch.zeros(1, *shape))

    def _examine(self, params: Tensors, head_layer: str | None) -> Examination:
        return outline(self._runnable, _zeros(params), _zeros(self._buffers), self._rows)

    @cached_property
    def vector_reason(self) -> str | None:
        """Nothing: clients can be stacked."""
        return None

    def init(self, generator: torch.Generator) -> tuple[Tensors, Tensors]:
        """Return drawn weights, then the parameters of norms; and running statistics."""
        params: Tensors = {}
        for layer in self.layers:
            params |= layer.init(generator, self._scheme)
        norms = {n: _initial(n, p) for n, p in self._params.items() if n not in params}
        return params | norms, {n: _initial(n, value) for n, value in self._buffers.items()}

    def to(self, device: torch.device) -> BuiltinBody:
        """Return the body itself, since it holds no values."""
        return self


def _zeros(values: Tensors) -> Tensors:
    return {name: torch.zeros(value.shape) for name, value in values.items()}


def _initial(name: str, like: Tensor) -> Tensor:
    """Return the initial value of a norm's scale, shift, running mean or running variance."""
    is_one = name.endswith((".weight", ".running_var"))
    return torch.full(like.shape, float(is_one))
