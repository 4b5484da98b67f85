"""What the replaced forwards of a module read while it is called."""

from __future__ import annotations

import threading
from types import MappingProxyType

from perdure.core.trees import Tensors
from perdure.models.forward_pass import ForwardPass
from perdure.models.layers import Layer


class _CurrentCall(threading.local):
    """The call of a module that this thread is in."""

    params: Tensors = MappingProxyType({})  # type: ignore[assignment]
    """The parameters of the call, by name."""
    fwd: ForwardPass = ForwardPass()
    """The forward pass of the call."""
    names: dict[int, str] = MappingProxyType({})  # type: ignore[assignment]
    """Names of the tensors that functions may be called with directly, by id."""
    layers: dict[str, Layer] | None = None
    """If a dict, layers that functions apply directly are added to it, by weight name."""
    unrecorded: set[str] | None = None
    """If a set, names of weights whose inputs are not recorded are added to it."""


CURRENT = _CurrentCall()
