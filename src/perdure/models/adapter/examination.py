"""Find the layers, the head and the way to run of a module."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from perdure.core.trees import Tensors
from perdure.models.adapter.functions import FunctionMode
from perdure.models.adapter.probe import (
    BadModule,
    Observation,
    RecordedInputs,
    RunnableModule,
    check_pure,
    observe,
    unwrapped,
)
from perdure.models.layers import Layer
from perdure.models.ops import ForwardPass

# ---- Which layer of a module is its head: its last Linear, or the one that a config names

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
    """Return the head of a module."""
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


# ---- Find the layers, the head and the way to run of a module

_REAL_ROWS = 4
"""Rows of the calls; the others stand for padding."""


@dataclass(frozen=True)
class Examination:
    """What is known of a module after a few calls."""

    head: Head | None
    feature_size: int
    layers: tuple[Layer, ...]
    """Linear and convolution weights, except the head, in the order of their first use."""
    unrecorded: tuple[str, ...]
    """Other weights, whose inputs cannot be recorded."""
    single_mode: bool
    """Whether functions must be replaced for a single client."""
    stacked_mode: bool
    """Whether functions must be replaced under vmap."""


def examine(
    module: RunnableModule, params: Tensors, buffers: Tensors, rows: Tensor, head_layer: str | None
) -> Examination:
    """Call a module a few times, prepare it for training, and return what was found.

    Raises:
        BadModule: The module cannot be trained.

    """
    module.install(quiet=True)
    module.place(set(module.names.values()))
    try:
        return _examine(module, params, buffers, rows, head_layer, torch.float64)
    except (RuntimeError, TypeError, ValueError, IndexError, AssertionError) as error:
        if "double" not in str(error).lower():
            raise _wrong_shape(error, rows) from error
    try:  # a module that converts its values to float32 itself
        return _examine(module, params, buffers, rows, head_layer, torch.float32)
    except (RuntimeError, TypeError, ValueError, IndexError, AssertionError) as error:
        raise _wrong_shape(error, rows) from error


def outline(module: RunnableModule, params: Tensors, buffers: Tensors, rows: Tensor) -> Examination:
    """Prepare a module that returns features, and return its layers; nothing is checked.

    All that needs a replacement must be called as a module, not as a function.
    """
    inputs = RecordedInputs()
    module.install(quiet=False)
    module.place(set(module.names.values()) - module.owned)
    with torch.no_grad():
        output = module(params, rows, ForwardPass(buffers=buffers, layer_inputs=inputs))
    seen = Observation(output, inputs)
    return _result(module, seen, seen, None, params)


def _wrong_shape(error: Exception, rows: Tensor) -> BadModule:
    if isinstance(error, NotImplementedError):
        return BadModule(f"a module without {error}")
    shape = "x".join(str(size) for size in rows.shape[1:])
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return BadModule(f"a module that takes inputs of {shape} ({reason})")


def _examine(
    module: RunnableModule,
    params: Tensors,
    buffers: Tensors,
    rows: Tensor,
    head_layer: str | None,
    dtype: torch.dtype,
) -> Examination:
    trial = module.in_dtype(dtype)
    params, buffers = _as(params, dtype), _as(buffers, dtype)
    x = rows.to(dtype) if rows.is_floating_point() else rows
    train = ForwardPass(train=True, buffers=buffers, batch_statistics=True, key=torch.tensor(1))
    seen = check_pure(trial, params, x[:_REAL_ROWS], train)
    check_output(seen.output, len(x[:_REAL_ROWS]))
    evaluated = observe(trial, params, x[:_REAL_ROWS], ForwardPass(buffers=buffers))
    head = find_head(trial, seen, params, head_layer)
    found = _result(module, seen, evaluated, head, params)
    for each in (trial, module):
        _prepare(each, found, seen.read | evaluated.read)
    _check_rows_are_independent(trial, found, params, x, train)
    return found


def _as(values: Tensors, dtype: torch.dtype) -> Tensors:
    return {n: v.to(dtype) if v.is_floating_point() else v for n, v in values.items()}


def _result(
    module: RunnableModule,
    seen: Observation,
    evaluated: Observation,
    head: Head | None,
    params: Tensors,
) -> Examination:
    layers = module.layers | seen.layers | evaluated.layers
    partly = seen.unrecorded | evaluated.unrecorded | seen.inputs.unjoined
    recorded = [
        name
        for name in dict.fromkeys(name for name, _ in seen.inputs.calls)
        if name in evaluated.inputs and name not in partly
    ]
    body = [name for name in recorded if head is None or name != head.weight]
    norms = {n for swap in module.swaps.values() if swap.layer is None for n in swap.names}
    known = {*recorded, *norms} | ({head.weight} if head else set())
    functions = seen.functions + evaluated.functions
    return Examination(
        head=head,
        feature_size=head.features if head else unwrapped(seen.output)[0].numel(),
        layers=tuple(layers[name] for name in body),
        unrecorded=tuple(n for n, p in params.items() if p.dim() > 1 and n not in known),
        single_mode=any(needed for _, needed in functions),
        stacked_mode=bool(functions),
    )


def _prepare(module: RunnableModule, found: Examination, read: set[str]) -> None:
    """Remove the head; choose replaced forwards and the parameters that are put in."""
    head, removed = found.head, set[str]()
    if head is not None:
        removed = {name for name in (head.weight, head.bias) if name}
        module.end_at(head.path, head.exact)
    module.place((set(module.names.values()) - module.owned | read) - removed)
    module.install(quiet=found.stacked_mode)


def _check_rows_are_independent(
    module: RunnableModule, found: Examination, params: Tensors, x: Tensor, fwd: ForwardPass
) -> None:
    """Refuse a module in which padding changes the features of other rows."""
    fwd = replace(fwd, key=None)
    mask = (torch.arange(len(x)) < _REAL_ROWS).to(x.dtype if x.is_floating_point() else None)
    mode = FunctionMode() if found.stacked_mode else None
    with torch.no_grad():
        alone = module(params, x[:_REAL_ROWS], replace(fwd, updates={}), mode)
        padded = module(params, x, replace(fwd, updates={}, mask=mask), mode)
    alone, padded = unwrapped(alone), unwrapped(padded)
    tolerance = 1e-6 if alone.dtype == torch.float64 else 1e-3
    if not torch.allclose(
        alone, padded[:_REAL_ROWS], rtol=tolerance, atol=tolerance, equal_nan=True
    ):
        raise BadModule("a module whose rows influence each other by batch norm alone")
