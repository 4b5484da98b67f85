"""Which layer of a module is its head: its last Linear, or the one that a config names."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from perdure.core.trees import Tensors
from perdure.models.adapter.probe import BadModule, Observation, unwrapped
from perdure.models.adapter.runnable_module import RunnableModule

NO_HEAD = "none"
"""Value of `model.head_layer` for a module whose output is the features."""


@dataclass(frozen=True)
class Head:
    """The head of a module."""

    path: str
    """Where it is, such as fc."""
    exact: bool
    """Whether the module returns its output as it is."""
    features: int
    """Size of its input."""
    weight: str
    """Name of its weight."""
    bias: str | None
    """Name of its bias."""


def find_head(
    module: RunnableModule, seen: Observation, params: Tensors, named: str | None
) -> Head | None:
    """Return the head of a module.

    Args:
        module: The module.
        seen: What a call did.
        params: The parameters of the call.
        named: The path of the head. If None, the last Linear that was called; if `none`, there is
            no head.
    """
    if named == NO_HEAD:
        return None
    weight = _named(module, named) if named else _last_linear(module, seen)
    path = next(p for p, swap in module.swaps.items() if swap.layer and swap.layer.name == weight)
    calls = [shape for name, shape in seen.inputs.calls if name == weight]
    if not calls:
        raise BadModule(f"a module that calls model.head_layer {path!r}")
    shared = [name for name in module.names.values() if name == weight]
    if len(calls) > 1 or len(shared) > 1 or weight in seen.read:
        raise BadModule(f"a module whose head {path!r} is used once and shares no weight")
    if len(calls[0]) != 2:
        raise BadModule(
            f"a module whose head {path!r} gets one row of features per example "
            f"(it gets {list(calls[0])})"
        )
    bias = weight.removesuffix("weight") + "bias"
    bias_name = bias if bias in params else None
    logits = F.linear(seen.inputs[weight], params[weight], params.get(bias))
    exact = _is_output(seen.output, logits)
    if not exact and named is None and not _follows(unwrapped(seen.output), logits):
        raise BadModule(
            f"a module whose output is that of its last Linear layer {path!r}, or one "
            "with model.head_layer: the name of a layer, or none"
        )
    return Head(path, exact, calls[0][1], weight, bias_name)


def _named(module: RunnableModule, path: str) -> str:
    layer = module.swaps[path].layer if path in module.swaps else None
    if layer is None or layer.kind != "linear":
        linear = [
            p for p, swap in module.swaps.items() if swap.layer and swap.layer.kind == "linear"
        ]
        raise BadModule(
            f"a module with the Linear layer {path!r} of model.head_layer (it has "
            f"{', '.join(linear) or 'none'})"
        )
    return layer.name


def _last_linear(module: RunnableModule, seen: Observation) -> str:
    layers = module.layers | seen.layers
    called = [name for name, _ in seen.inputs.calls if layers[name].kind == "linear"]
    if not called:
        raise BadModule(
            "a module that calls a Linear layer, or one with model.head_layer: none, if "
            "its output is the features"
        )
    if called[-1] not in module.layers:
        raise BadModule(
            f"a module whose last Linear layer is an nn.Linear (it applies {called[-1]!r} directly)"
        )
    return called[-1]


def _is_output(output: object, logits: Tensor) -> bool:
    return isinstance(output, Tensor) and _close(output, logits)


def _follows(output: object, logits: Tensor) -> bool:
    """Return whether the output is the logits, their softmax or log softmax, or a part of these."""
    if not isinstance(output, Tensor):
        return False
    known = (logits, F.log_softmax(logits, -1), F.softmax(logits, -1))
    return any(_close(output, value) for value in known)


def _close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(torch.allclose(a, b, rtol=1e-4, atol=1e-6, equal_nan=True))


def check_output(output: object, rows: int) -> None:
    """Refuse an output that is not one row of numbers per example."""
    value = unwrapped(output)
    if not isinstance(value, Tensor):
        raise BadModule(f"a module that returns a tensor (it returns a {type(value).__name__})")
    if not value.is_floating_point() or value.dim() < 2 or len(value) != rows:
        kind = str(value.dtype).removeprefix("torch.")
        raise BadModule(
            "a module that returns one row of floats per example (it returns "
            f"{kind} {list(value.shape)} for {rows} rows)"
        )


def head_values(module: nn.Module, head: Head | None) -> Tensors:
    """Return the weight and bias of a module's head, by the names of a shared head."""
    if head is None:
        return {}
    layer = module.get_submodule(head.path)
    return {f"head.{key}": p.detach().clone() for key, p in layer.named_parameters(recurse=False)}
