"""Call a module a few times before training, to find its layers and to refuse what cannot be run.

All calls are in double precision, in which batch norm over a few rows does not hide a difference.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from perdure.core.trees import Tensors
from perdure.models.adapter.current_call import CURRENT
from perdure.models.adapter.function_mode import RULES, FunctionMode
from perdure.models.adapter.module_state import changed_state, module_state
from perdure.models.adapter.runnable_module import RunnableModule
from perdure.models.forward_pass import ForwardPass
from perdure.models.layers import Layer

_ONLY_STACKED = (F.scaled_dot_product_attention, F.group_norm)
"""Functions that need their rule under vmap alone, if they do not draw noise."""


class BadModule(Exception):
    """A module that cannot be trained: what it must be, as a noun phrase."""


class RecordedInputs(dict[str, Tensor]):
    """The input of each layer by weight name: copied, and joined if a layer is used again."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, torch.Size]] = []
        self.unjoined: set[str] = set()
        """Layers with inputs of several sizes, of which the first alone is kept."""

    def __setitem__(self, name: str, x: Tensor) -> None:
        self.calls.append((name, x.shape))
        if name not in self:
            super().__setitem__(name, x.clone())  # it may be changed in place later on
        elif x.dim() != 4:
            flat = [t.reshape(-1, t.shape[-1]) for t in (self[name], x)]
            super().__setitem__(name, torch.cat(flat))
        elif x.shape[1:] == self[name].shape[1:]:
            super().__setitem__(name, torch.cat([self[name], x]))
        else:
            self.unjoined.add(name)


@dataclass
class Observation:
    """What one call of a module did."""

    output: Any
    inputs: RecordedInputs
    layers: dict[str, Layer] = field(default_factory=dict)
    """Layers that functions applied directly."""
    read: set[str] = field(default_factory=set)
    """Parameters that were read by other code than replaced forwards."""
    unrecorded: set[str] = field(default_factory=set)
    """Weights that were used without a record of their input."""
    functions: list[tuple[Any, bool]] = field(default_factory=list)
    """Functions with a rule that were called, and whether they need it on a single client."""
    random: list[str] = field(default_factory=list)
    """Operations that drew random numbers."""


def observe(module: RunnableModule, params: Tensors, x: Tensor, fwd: ForwardPass) -> Observation:
    """Call a module with all rules active, and return what it did."""
    seen = Observation(None, RecordedInputs())
    fwd = replace(fwd, layer_inputs=seen.inputs, updates={}, dropout_calls=0)

    def on_call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        names = [CURRENT.names[id(t)] for t in _tensors(args, kwargs) if id(t) in CURRENT.names]
        seen.read.update(names)
        if func in RULES:
            seen.functions.append((func, _needs_rule(func, names, args, kwargs)))
        elif not _is_plain_attribute(func, args):
            seen.unrecorded.update(names)

    CURRENT.layers, CURRENT.unrecorded = seen.layers, seen.unrecorded
    try:
        with torch.no_grad(), _Random(seen.random):
            seen.output = module(params, x, fwd, FunctionMode(on_call))
    finally:
        CURRENT.layers, CURRENT.unrecorded = None, None
    return seen


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    for value in (*args, *kwargs.values()):
        for item in value if isinstance(value, list | tuple) else (value,):
            if isinstance(item, Tensor):
                yield item


def _needs_rule(func: Any, names: list[str], args: tuple[Any, ...], kwargs: Any) -> bool:
    if func in (F.linear, torch.conv2d, torch.conv1d):
        return bool(names)
    if func is F.scaled_dot_product_attention:
        return bool(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0))
    return func not in _ONLY_STACKED


def _is_plain_attribute(func: Any, args: tuple[Any, ...]) -> bool:
    """Return whether a function reads an attribute such as shape, which is not a tensor."""
    return getattr(func, "__name__", "") == "__get__" and not isinstance(func(*args), Tensor)


class _Random(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes which operations draw from a generator."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = found

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags and "scaled_dot" not in str(func):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def check_pure(module: RunnableModule, params: Tensors, x: Tensor, fwd: ForwardPass) -> Observation:
    """Return what a call does; refuse one that draws random numbers or changes the module."""
    first = observe(module, params, x, fwd)
    if first.random:
        raise BadModule(
            f"a module whose only noise is dropout (its forward calls {first.random[0]})"
        )
    state = module_state(module.module)
    second = observe(module, params, x, fwd)
    changed = changed_state(state, module_state(module.module))
    if changed:
        raise BadModule(
            "a module whose forward changes nothing but batch norm statistics (it changes "
            f"{changed!r})"
        )
    a, b = _values(first.output), _values(second.output)
    if not torch.equal(a.isnan(), b.isnan()) or not torch.allclose(a, b, equal_nan=True):
        raise BadModule("a module whose only noise is dropout (two calls differ)")
    return first


def _values(output: Any) -> Tensor:
    output = unwrapped(output)
    return output if isinstance(output, Tensor) else torch.zeros(())


def unwrapped(output: Any) -> Any:
    """Return the logits of an output of a transformers model, any other output as it is."""
    return output if isinstance(output, Tensor) else getattr(output, "logits", output)
