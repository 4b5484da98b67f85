"""A trained model that predicts the class of new examples, or a number."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, overload

import numpy as np
import torch
from torch import Tensor, nn

from perdure.config import Config
from perdure.contract.context import Server
from perdure.contract.method import Method
from perdure.core.errors import UserError
from perdure.core.notebook import html_table
from perdure.core.states import partial_from_tree, to_tree
from perdure.core.trees import Tensors, join_tree, split_tree
from perdure.data.examples import Normalization, NumberScale, Text
from perdure.data.sources.table import frame_features
from perdure.data.text import hash_words, token_rows
from perdure.deploy.predictions import (
    OutputMap,
    Prediction,
    RowScores,
    class_probabilities,
    describe_rows,
    model_rows,
    score_rows,
)
from perdure.models.layers import Card
from perdure.models.network import Network

# ---- A trained model as a plain nn.Module: raw inputs in, one score per class out

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
        self._constants = self._add(dict(network.body.constants))
        self._state_slots = self._add(state, f"{_STATE}.")
        self._outputs = self._add(dict(vars(outputs)), f"{_OUTPUTS}.")
        self._normalization = self._add({"scale": scale, "shift": shift}, f"{_INPUT}.")

    def forward(self, x: Tensor) -> Tensor:
        """Return the score of every class, float [rows, classes].

        The largest one is that of the predicted class; -inf for classes that cannot be predicted.

        Args:
            x: Inputs before normalization, [rows, *shape] with the channels first.

        """
        body = self._network.body.with_constants(_values(self._constants))
        rows = self._normalized(x)
        outputs, network = OutputMap(**_values(self._outputs)), self._network.with_body(body)
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


Labels = np.ndarray[Any, Any]
InputRows = np.ndarray[Any, Any] | Tensor | Sequence[str]
_ROWS_PER_CHUNK = 1024


@dataclass(frozen=True, repr=False)
class TrainedModel:
    """A trained model that predicts the class of new examples, or a number."""

    config: Config
    method: Method
    network: Network
    server: Server
    class_names: tuple[str, ...]
    """The name of every class, by label."""
    shape: tuple[int, ...]
    """Shape of one example: (channels, height, width), (channels, length) or (features,)."""
    scale: Tensor
    """Normalization of the inputs, float32 [values per example]."""
    shift: Tensor
    """Normalization of the inputs, float32 [values per example]."""
    last_task: int
    """The last task that was trained, from 0."""
    backbone: Card | None = None
    """Identifies the pretrained weights of the backbone. None if there are none."""
    dtype: torch.dtype = torch.uint8
    """Type of the inputs before normalization: uint8, float32, or int32 for tokens."""
    feature_names: tuple[str, ...] | None = None
    """The columns of a table that are the features of an input. None for other data."""
    numbers: NumberScale | None = None
    """Scale of the numbers that it predicts. None if it predicts classes."""

    @overload
    def predict(
        self, x: InputRows, *, details: Literal[False] = False, same_task: bool = False
    ) -> Labels: ...

    @overload
    def predict(
        self, x: InputRows, *, details: Literal[True], same_task: bool = False
    ) -> list[Prediction]: ...

    def predict(
        self, x: InputRows, *, details: bool = False, same_task: bool = False
    ) -> Labels | list[Prediction]:
        """Predict the class (or the number) of every example, without a task label.

        The prediction is routed if the method can route, else task-agnostic.

        Args:
            x: uint8 images of the size of the training data: [N, H, W], [N, H, W, C] or
                [N, C, H, W]. For a model that was trained on floats, numbers of the shape of the
                training data, or a DataFrame with the columns of a table. For a model that was
                trained on texts, strings or pairs of strings.
            details: Whether to return each prediction with its probability, task and margin.
            same_task: Whether all examples are of one task, which is not known. Then a method that
                routes batches (`routing: batch`) does so, as in its evaluation. If False, it
                predicts the task of each example from the example alone.

        Returns:
            Labels, int64 [N]; `class_names[label]` is the name of a class. With `details`, one
            `Prediction` per example. If numbers are predicted (`data.target: number`), double [N]
            in the unit of the data.

        Raises:
            UserError: `x` has another type or shape, or numbers are asked for details.

        """
        if self.numbers is not None and not details:
            return self._predict_numbers(x, self.numbers)
        chunks = self._scored(x, same_task)
        if details:
            return [row for scored in chunks for row in describe_rows(scored, self.class_names)]
        labels = [scored.classes.argmax(1) for scored in chunks]
        return torch.cat(labels).numpy() if labels else np.zeros(0, dtype=np.int64)

    def probabilities(self, x: InputRows, *, same_task: bool = False) -> np.ndarray[Any, Any]:
        """Predict the probability of every class, by softmax.

        The largest one is that of the class that `predict` returns. Classes that are not considered
        have probability 0: those that no task so far has, and, if the method routes, those that the
        predicted task does not have.

        Args:
            x: As in `predict`.
            same_task: As in `predict`.

        Returns:
            double [N, classes], rows that sum to 1; column `label` is class `class_names[label]`.

        """
        rows = [class_probabilities(scored.classes) for scored in self._scored(x, same_task)]
        return torch.cat(rows).numpy() if rows else np.zeros((0, len(self.class_names)))

    def predict_tasks(self, x: InputRows, *, same_task: bool = False) -> Labels | None:
        """Predict the task of every example, from 0: int64 [N]; -1 for no known task.

        None if the method cannot route. The arguments and errors are those of `predict`, which
        predicts the class of an example of no known task among those of all tasks.
        """
        routes = [scored.routes for scored in self._scored(x, same_task)]
        known = [tasks for tasks in routes if tasks is not None]
        if len(known) < len(routes):
            return None
        return torch.cat(known).numpy() if known else np.zeros(0, dtype=np.int64)

    def __repr__(self) -> str:
        return f"TrainedModel({', '.join(self._facts().values())})"

    def _repr_html_(self) -> str:
        return html_table("TrainedModel", ["", ""], list(self._facts().items()))

    def _facts(self) -> dict[str, str]:
        size = sum(value.numel() for value in self.server.params.values())
        return {
            "method": str(self.config.method["kind"]),
            "model": f"{self.config.model.kind} with {size:,} parameters",
            "tasks": f"{self.last_task + 1} task{'s' if self.last_task else ''}",
            "output": "numbers" if self.numbers else f"{len(self.class_names)} classes",
            "input": f"{str(self.dtype).removeprefix('torch.')} rows of shape {self.shape}",
        }

    def _predict_numbers(self, x: InputRows, scale: NumberScale) -> np.ndarray[Any, Any]:
        parts = (self.method.predict(self.server, rows, self.network) for rows in self._chunks(x))
        numbers = [outputs[:, 0] for outputs in parts]
        return scale.restore(torch.cat(numbers)).detach().numpy() if numbers else np.zeros(0)

    def _scored(self, x: InputRows, same_task: bool) -> Iterator[RowScores]:
        if self.numbers is not None:
            raise UserError("model: must predict classes for probabilities and tasks, got numbers")
        method = self.method if same_task else self.method.for_mixed_rows()
        for rows in self._chunks(x):
            with torch.no_grad():
                yield score_rows(method, self.server, self.network, self._outputs, rows)

    @cached_property
    def _outputs(self) -> OutputMap:
        return OutputMap.of(self.network.outputs, self.last_task)

    def _chunks(self, x: InputRows) -> Iterator[Tensor]:
        normalization = Normalization(self.scale, self.shift)
        for rows in torch.split(self._rows(x), _ROWS_PER_CHUNK):
            yield normalization.apply(rows).view(-1, *self.shape)

    @cached_property
    def module(self) -> ModelModule:
        """The model as a plain nn.Module: raw inputs [N, *shape] in, class scores [N, classes] out.

        `module(x).argmax(1)` is what `predict` returns, and `module(x).softmax(1)` what
        `probabilities` returns. Its values are copies.

        Raises:
            UserError: The model predicts numbers.

        """
        if self.numbers is not None:
            raise UserError("model: must predict classes to be exported, got numbers")
        return ModelModule(
            self.method, self.server, self.network, self._outputs,
            self.shape, self.scale, self.shift,
        ).eval()  # fmt: skip

    def text_rows(self, texts: Sequence[Text]) -> Tensor:
        """Return texts as inputs of the model: int32 tokens or uint8 word counts [N, values]."""
        model: Any = self.config.model
        if model.reads_text:
            return token_rows(texts, model, self.shape[0], self.backbone)
        if len(self.shape) == 3:
            raise UserError(f"input: must be images of shape {self.shape}, got texts")
        return hash_words(texts, self.shape[0])

    def _rows(self, x: InputRows) -> Tensor:
        if self.feature_names is not None and hasattr(x, "columns"):
            x = frame_features(x, self.feature_names)
        if isinstance(x, list | tuple) and all(_is_text(text) for text in x):
            x = self.text_rows(x)
        return model_rows(torch.as_tensor(x), self.shape, self.dtype)


def _is_text(value: Any) -> bool:
    if isinstance(value, tuple):
        return len(value) == 2 and all(isinstance(text, str) for text in value)
    return isinstance(value, str)
