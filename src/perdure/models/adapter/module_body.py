"""A user's module, without its head, as the body of a network."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from perdure.core.trees import Tensors
from perdure.models.adapter.examination import Examination, examine, head_values
from perdure.models.adapter.functions import FunctionMode
from perdure.models.adapter.probe import (
    BadModule,
    RecordedInputs,
    RunnableModule,
    parameter_names,
    statistics_of,
    unwrapped,
)
from perdure.models.layers import Body
from perdure.models.ops import ForwardPass

# ---- Whether clients with separate parameters can be computed as one stack

_TOLERANCE = 1e-6
_PADDING = 2

Features = Callable[[Tensors, Tensor, ForwardPass], Tensor]


def why_not_stacked(
    features: Features, params: Tensors, buffers: Tensors, rows: Tensor
) -> str | None:
    """Return why two clients cannot be stacked, or None if they can.

    The stack has padding and dropout, and is compared with one client after the other.
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


# ---- A user's module, without its head, as the body of a network

PART_VALUES = 1 << 20
"""Input values of the rows that are predicted together: more leave the caches of a processor."""


class ModuleBody(Body):
    """A private copy of a module, run as a pure function of its parameters.

    A few calls in the constructor find its layers and its head, and refuse modules that cannot be
    trained under the rules of this library (raising `BadModule`).

    Args:
        module: The module, which is not changed. Its values are the initial ones.
        rows: A few inputs, float [rows, ...].
        head_layer: Path of its head. If None, its last Linear; if `none`, its output is the
            features.
        frozen: Patterns of names of parameters that are not trained.

    """

    def __init__(
        self,
        module: nn.Module,
        rows: Tensor,
        head_layer: str | None = None,
        frozen: Sequence[str] = (),
    ) -> None:
        values, constant = parameters_of(module), frozen_parameters(module, frozen)
        self._rows, self._buffers = rows, statistics_of(module)
        self._runnable = RunnableModule(module, _fixed_norms(module, constant))
        self.has_running_statistics = all(
            norm.track_running_stats for _, norm in _batch_norms(module)
        )
        seen = self.examination = self._examine(values, head_layer)
        own = {} if seen.head is None else {seen.head.weight, seen.head.bias}
        self.initial_head = head_values(module, seen.head)
        self.constants = {n: v for n, v in values.items() if n in constant and n not in own}
        self._params = {n: v for n, v in values.items() if n not in constant and n not in own}
        self.feature_size = seen.feature_size
        self.layers = tuple(layer for layer in seen.layers if layer.name in self._params)
        self.unprotected = tuple(name for name in seen.unrecorded if name in self._params)
        self._runnable.drop_values()

    def _examine(self, params: Tensors, head_layer: str | None) -> Examination:
        return examine(self._runnable, params, self._buffers, self._rows, head_layer)

    @property
    def head_bias(self) -> bool:
        """Whether the head has a bias."""
        return self.examination.head is None or self.examination.head.bias is not None

    @cached_property
    def vector_reason(self) -> str | None:
        """Why clients cannot be stacked, or None if they can."""
        double = self.in_double()
        return why_not_stacked(
            double.features, double._params, double._buffers, double._rows[: len(self._rows)]
        )

    def init(self, generator: torch.Generator) -> tuple[Tensors, Tensors]:
        """Return the module's values and running statistics; nothing is drawn."""
        params = {name: value.clone() for name, value in self._params.items()}
        return params, {name: value.clone() for name, value in self._buffers.items()}

    def features(
        self, params: Tensors, x: Tensor, fwd: ForwardPass, tasks: int | None = None
    ) -> Tensor:
        """Return the head's input, float [batch, feature_size]."""
        if self.constants:
            params = {**self.constants, **params}
        mapped = fwd.stacked or fwd.under_vmap
        needs_mode = self.examination.stacked_mode if mapped else self.examination.single_mode
        mode = FunctionMode() if needs_mode else None
        rows = max(1, PART_VALUES // max(1, math.prod(x.shape[1:])))
        # without dropout and statistics of the batch, rows do not depend on each other
        independent = self.has_running_statistics and not (
            mapped or fwd.train or fwd.batch_statistics
        )
        out: Any
        if fwd.layer_inputs is not None:
            recorded = RecordedInputs()
            inner = replace(fwd, layer_inputs=recorded)
            out = self._runnable(params, x, inner, mode)
            fwd.dropout_calls = inner.dropout_calls
            fwd.layer_inputs.update({layer.name: recorded[layer.name] for layer in self.layers})
        elif independent and not torch.compiler.is_compiling() and len(x) > rows:
            # not in an exported program, which is of any number of rows
            parts = torch.split(x, rows)
            out = torch.cat([unwrapped(self._runnable(params, x, fwd, mode)) for x in parts])
        else:
            out = self._runnable(params, x, fwd, mode)
        features: Tensor = out if isinstance(out, Tensor) else unwrapped(out)
        return features if features.dim() == 2 else features.flatten(1)

    def to(self, device: torch.device) -> ModuleBody:
        """Return the body with its constants on a device."""
        self._runnable.move(device)
        self.constants = {name: value.to(device) for name, value in self.constants.items()}
        return self

    def with_constants(self, constants: Tensors) -> ModuleBody:
        """Return a copy with other values of its constants."""
        other = copy.copy(self)
        other.constants = constants
        return other

    def in_double(self) -> ModuleBody:
        """Return a copy that computes in double precision."""
        other = copy.copy(self)
        other._runnable = self._runnable.in_dtype(torch.float64)
        for name in ("constants", "_params", "_buffers"):
            values: Tensors = getattr(self, name)
            setattr(other, name, {n: _wide(v) for n, v in values.items()})
        other._rows = _wide(self._rows)
        return other


def _wide(value: Tensor) -> Tensor:
    return value.double() if value.is_floating_point() else value


def parameters_of(module: nn.Module) -> Tensors:
    """Return a copy of a module's parameters by our names."""
    names = parameter_names(module)
    return {names[path]: p.detach().clone() for path, p in module.named_parameters()}


def frozen_parameters(module: nn.Module, patterns: Sequence[str]) -> set[str]:
    """Return the names of the parameters that patterns match or that require no gradient.

    A pattern matches a name (`conv1.weight`), a module (`layer1`), or several (`layer*.bn?.*`).

    Raises:
        BadModule: A pattern matches nothing.

    """
    names = parameter_names(module)
    frozen = {names[path] for path, p in module.named_parameters() if not p.requires_grad}
    for pattern in patterns:
        matched = {n for path, n in names.items() if _matches(path, pattern)}
        if not matched:
            raise BadModule(
                f"a module with parameters that model.frozen {pattern!r} matches (it has "
                f"{_listed(list(names))})"
            )
        frozen |= matched
    return frozen


def _matches(path: str, pattern: str) -> bool:
    return fnmatchcase(path, pattern) or fnmatchcase(path, f"{pattern}.*")


def _listed(names: list[str], limit: int = 6) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def _fixed_norms(module: nn.Module, frozen: set[str]) -> list[str]:
    """Return the paths of batch norms whose parameters are all frozen: so are their statistics."""
    names, paths = parameter_names(module), []
    for path, norm in _batch_norms(module):
        own = [names[f"{path}.{key}"] for key, _ in norm.named_parameters(recurse=False)]
        if own and frozen.issuperset(own):
            paths.append(path)
    return paths


def _batch_norms(module: nn.Module) -> Iterator[tuple[str, nn.modules.batchnorm._BatchNorm]]:
    for path, part in module.named_modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            yield path, part
