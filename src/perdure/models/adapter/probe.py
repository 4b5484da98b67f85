"""A module that is called with parameters as arguments, and a few trial calls before training."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from perdure.core.trees import Tensors
from perdure.models.adapter.functions import RULES, FunctionMode
from perdure.models.adapter.swaps import (
    CURRENT,
    Forward,
    Part,
    Swap,
    call_directly,
    is_plain_sequence,
    make_swap,
)
from perdure.models.layers import Layer
from perdure.models.ops import ForwardPass

# ---- A module that is called with parameters, running statistics and a forward pass as arguments.

STATISTICS = ("running_mean", "running_var")


class HeadReached(Exception):
    """Ends a call at the head, with the head's input."""


class RunnableModule:
    """A private copy of a module, whose known parts are replaced by ours (`swaps`).

    Parameters that these do not read are put into the module for the time of a call.
    """

    def __init__(self, module: nn.Module, fixed_norms: Iterable[str] = ()) -> None:
        self.module, self.fixed_norms = copy.deepcopy(module), tuple(fixed_norms)
        self._train(True)
        call_directly(self.module)
        self._is_sequence = is_plain_sequence(self.module)
        for part in self.module.modules():
            if getattr(part, "inplace", None) is True:
                part.inplace = False  # type: ignore[assignment]
        self.names = parameter_names(self.module)
        self.swaps = self._make_swaps()
        self.layers: dict[str, Layer] = {
            swap.layer.name: swap.layer for swap in self.swaps.values() if swap.layer
        }
        self.owned = {name for swap in self.swaps.values() for name in swap.names}
        self._lock = threading.RLock()

    def _make_swaps(self) -> dict[str, Swap]:
        swaps = {}
        for path, module in self.module.named_modules():
            part = Part(module, path, our_name(path), self.names, not module.training)
            swap = make_swap(part)
            if swap is not None:
                swaps[path] = swap
        return swaps

    def _train(self, mode: bool) -> None:
        self.module.train(mode)
        for path in self.fixed_norms:
            self.module.get_submodule(path).training = False

    def install(self, quiet: bool) -> None:
        """Replace the forwards; `quiet` ones do not slow down in a `FunctionMode`."""
        for path, swap in self.swaps.items():
            part: Any = self.module.get_submodule(path)
            part.forward = _quiet(swap.forward) if quiet else swap.forward

    def place(self, loose: set[str]) -> None:
        """Choose the parameters that are put into the module; a read of others fails."""
        self._slots = [
            (self._owner(path), path.rpartition(".")[2], name)
            for path, name in self.names.items()
            if name in loose
        ]
        self._statistics = [
            (part._buffers, key, f"{our_name(path)}.{key}")
            for path, part in self.module.named_modules()
            if path not in self.swaps and isinstance(part, nn.modules.batchnorm._BatchNorm)
            for key in STATISTICS
            if part._buffers.get(key) is not None
        ]

    def drop_values(self) -> None:
        """Forget the parameters' values: those that nobody puts in again cannot be read."""
        for path in self.names:
            owner, key = self._owner(path), path.rpartition(".")[2]
            empty = owner._parameters[key].detach().to("meta")
            owner._parameters[key] = nn.Parameter(empty, requires_grad=False)

    def _owner(self, path: str) -> Any:
        return self.module.get_submodule(path.rpartition(".")[0])

    def end_at(self, head: str, exact: bool) -> None:
        """Return the head's input: by an identity if the module ends there, else by leaving it."""
        part: Any = self.module.get_submodule(head)
        part.forward = _identity if exact else _leave
        self.swaps.pop(head, None)

    def in_dtype(self, dtype: torch.dtype) -> RunnableModule:
        """Return a copy in another precision."""
        other = copy.copy(self)
        other.module, other.swaps = copy.deepcopy(self.module).to(dtype), dict(self.swaps)
        other.place({name for _, _, name in self._slots})
        return other

    def move(self, device: torch.device) -> None:
        """Move the module's buffers to a device."""
        for part in self.module.modules():
            for key, value in part._buffers.items():
                part._buffers[key] = value if value is None else value.to(device)

    def __call__(
        self, params: Tensors, x: Tensor, fwd: ForwardPass, mode: FunctionMode | None = None
    ) -> Any:
        """Return the module's output, or the head's input after `end_at`."""
        if self.module.training != fwd.train:
            self._train(fwd.train)
        before = CURRENT.params, CURRENT.fwd, CURRENT.names
        CURRENT.params, CURRENT.fwd = params, fwd
        try:
            if not self._slots and not self._statistics and mode is None:
                if not self._is_sequence:
                    return self.module(x)
                for part in self.module._modules.values():
                    x = part.forward(x)  # type: ignore[union-attr]
                return x
            with self._lock:
                return self._with_slots(params, x, fwd, mode)
        except HeadReached as reached:
            return reached.args[0]
        finally:
            CURRENT.params, CURRENT.fwd, CURRENT.names = before

    def _with_slots(
        self, params: Tensors, x: Tensor, fwd: ForwardPass, mode: FunctionMode | None
    ) -> Any:
        names: dict[int, str] = {}
        CURRENT.names = names
        old: list[Any] = []
        try:
            for owner, key, name in self._slots:
                old.append(owner._parameters[key])
                _put(owner, key, params[name])
                names[id(params[name])] = name
            for buffers, key, name in self._statistics:
                old.append(buffers[key])
                buffers[key] = fwd.buffers[name]
                names[id(fwd.buffers[name])] = name
            with mode if mode is not None else nullcontext():
                return self.module(x)
        finally:
            for (owner, key, _), value in zip(self._slots, old, strict=False):
                _put(owner, key, value)
            for (buffers, key, _), value in zip(
                self._statistics, old[len(self._slots) :], strict=False
            ):
                buffers[key] = value


def our_name(path: str) -> str:
    """Return our name of a parameter or module: those of a head are reserved for ours."""
    return f"body.{path}" if path == "head" or path.startswith("head.") else path


def parameter_names(module: nn.Module) -> dict[str, str]:
    """Return our names of all parameters by path; tied parameters have one name."""
    first = {id(p): our_name(path) for path, p in module.named_parameters()}
    every = module.named_parameters(remove_duplicate=False)
    return {path: first[id(p)] for path, p in every}


def statistics_of(module: nn.Module) -> Tensors:
    """Return the running statistics of batch norms by our names."""
    return {
        our_name(path): buffer.detach().clone()
        for path, buffer in module.named_buffers()
        if path.rpartition(".")[2] in STATISTICS
        and isinstance(
            module.get_submodule(path.rpartition(".")[0]), nn.modules.batchnorm._BatchNorm
        )
    }


def _put(owner: Any, key: str, value: Any) -> None:
    owner._parameters[key] = value
    if isinstance(owner, nn.RNNBase):
        owner._flat_weights[owner._flat_weights_names.index(key)] = value


def _quiet(forward: Forward) -> Forward:
    def quiet(x: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():
            return forward(x)

    return quiet


def _identity(x: Tensor) -> Tensor:
    return x


def _leave(x: Tensor) -> Tensor:
    raise HeadReached(x)


# ---- The state of a module besides its parameters, to notice what a call changes

_INTERNAL = ("_parameters", "_buffers", "_modules", "training")
_COUNTERS = "num_batches_tracked"


def module_state(module: nn.Module) -> dict[str, Any]:
    """Return the attributes and buffers of a module and its parts, by path."""
    state: dict[str, Any] = {}
    for path, part in module.named_modules():
        values = {key: v for key, v in vars(part).items() if key not in _INTERNAL}
        buffers = {key: v for key, v in part._buffers.items() if key != _COUNTERS}
        for key, value in (values | buffers).items():
            state[f"{path}.{key}".lstrip(".")] = _snapshot(value)
    return state


def _snapshot(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, list | tuple | dict | set):
        return len(value)
    return value if isinstance(value, int | float | str | bool) else type(value)


def changed_state(before: dict[str, Any], after: dict[str, Any]) -> str | None:
    """Return the path of the first value that changed, or None."""
    return next((path for path in after if not _same(before.get(path), after[path])), None)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and bool(torch.equal(a, b))
    return type(a) is type(b) and bool(a == b)


# ---- Call a module a few times before training, to find its layers and to refuse what cannot be
# run
#
# All calls are in double precision, in which batch norm over a few rows does not hide a difference.

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
