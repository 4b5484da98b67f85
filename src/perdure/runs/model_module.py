"""A trained model as a plain nn.Module: raw inputs in, one score per class out."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from perdure.contract.context import Server
from perdure.contract.method import Method
from perdure.contract.states import partial_from_tree, to_tree
from perdure.core.trees import Tensors, join_tree, split_tree
from perdure.models.network import Network
from perdure.runs.class_scores import OutputMap, score_rows

Slots = dict[str, tuple[nn.Module, str]]
"""By name the container of a tensor, and its name there."""
_INPUT, _STATE, _OUTPUTS = "_input", "_state", "_outputs_of"
"""Prefixes of tensors that are not the network's; no module of a user has such names."""


class ModelModule(nn.Module):
    """Normalization, network, heads, masks and routing of a trained model.

    Parameters have their names in training, such as `head.weight`. Names of tensors that are not
    the network's start with `_input` (normalization), `_state` (what the method keeps, such as its
    router) and `_outputs_of` (classes and tasks of the outputs). `forward` predicts each row from
    the row alone, and needs neither a run directory nor its config.

    Args:
        method: The method, which predicts and may route.
        server: The trained parameters and the method's state. All values are copied.
        network: The network with the outputs so far.
        outputs: Classes and tasks of the network's outputs.
        shape: Shape of one example.
        scale: Normalization of the inputs, float32 [values per example].
        shift: Normalization of the inputs, float32 [values per example].
    """

    def __init__(
        self,
        method: Method,
        server: Server,
        network: Network,
        outputs: OutputMap,
        shape: tuple[int, ...],
        scale: Tensor,
        shift: Tensor,
    ) -> None:
        """Copy the tensors into parameters and buffers."""
        super().__init__()
        self._method, self._network = method.for_mixed_rows(), network
        self._shape = shape
        self._skeleton, state = split_tree(to_tree(server.state))
        self._params = self._add({n: nn.Parameter(v.clone()) for n, v in server.params.items()})
        self._statistics = self._add(server.buffers)
        self._constants = self._add(network.constants)
        self._state_slots = self._add(state, f"{_STATE}.")
        self._outputs = self._add(dict(vars(outputs)), f"{_OUTPUTS}.")
        self._normalization = self._add({"scale": scale, "shift": shift}, f"{_INPUT}.")

    def forward(self, x: Tensor) -> Tensor:
        """Return the score of every class, float [rows, classes].

        The largest one is that of the predicted class; -inf for classes that cannot be predicted.

        Args:
            x: Inputs before normalization, [rows, *shape] with the channels first.
        """
        network = self._network.with_constants(_values(self._constants))
        rows = self._normalized(x)
        outputs = OutputMap(**_values(self._outputs))
        return score_rows(self._method, self._server(), network, outputs, rows).classes

    def _normalized(self, x: Tensor) -> Tensor:
        if x.dtype == torch.int32:
            return x
        scale, shift = _values(self._normalization).values()
        flat = x.reshape(-1, math.prod(self._shape)).to(torch.float32)
        return torch.addcmul(shift, flat, scale).reshape(-1, *self._shape)

    def _server(self) -> Server:
        tree = join_tree(self._skeleton, _values(self._state_slots))
        state = partial_from_tree(self._method.ServerState, tree)
        return Server(_values(self._params), _values(self._statistics), state)

    def _add(self, tensors: Tensors, prefix: str = "") -> Slots:
        """Store tensors under dotted names, parameters as such and a copy of others as buffers."""
        return {
            name: _register(self, prefix + name.replace("/", "."), tensor)
            for name, tensor in tensors.items()
        }


def _register(root: nn.Module, name: str, value: Tensor) -> tuple[nn.Module, str]:
    """Store a tensor under a dotted name, in containers that are added; return where it is."""
    *path, last = name.split(".")
    for step in path:
        if step not in root._modules:
            root.add_module(step, nn.Module())
        root = root.get_submodule(step)
    if isinstance(value, nn.Parameter):
        root.register_parameter(last, value)
    else:
        root.register_buffer(last, value.clone())
    return root, last


def _values(slots: Slots) -> Tensors:
    return {name: getattr(module, key) for name, (module, key) in slots.items()}
