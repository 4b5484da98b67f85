"""A module that is called with parameters, running statistics and a forward pass as arguments."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from perdure.core.trees import Tensors
from perdure.models.adapter.current_call import CURRENT
from perdure.models.adapter.direct_calls import call_directly
from perdure.models.adapter.function_mode import FunctionMode
from perdure.models.adapter.swaps import Forward, Part, Swap, make_swap
from perdure.models.forward_pass import ForwardPass
from perdure.models.layers import Layer

STATISTICS = ("running_mean", "running_var")


class HeadReached(Exception):
    """Ends a call at the head, with the head's input."""


class RunnableModule:
    """A private copy of a module, whose known parts are replaced by ours (`swaps`).

    Parameters that these do not read are put into the module for the time of a call.

    Args:
        module: The module, which is not changed.
        fixed_norms: Paths of batch norms that always use their running statistics.
    """

    def __init__(self, module: nn.Module, fixed_norms: Iterable[str] = ()) -> None:
        self.module, self.fixed_norms = copy.deepcopy(module), tuple(fixed_norms)
        self._train(True)
        call_directly(self.module)
        for part in self.module.modules():
            if getattr(part, "inplace", None) is True:
                part.inplace = False  # type: ignore[assignment]
        self.names = parameter_names(self.module)
        self.swaps = self._make_swaps()
        self.layers: dict[str, Layer] = {
            swap.layer.name: swap.layer for swap in self.swaps.values() if swap.layer
        }
        self.owned = {name for swap in self.swaps.values() for name in swap.names}
        self.install(quiet=True)
        self.place(set(self.names.values()))
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
                return self.module(x)
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
