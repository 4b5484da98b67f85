"""A trained model that predicts the class of new examples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from perdure.config import Config, TextModel
from perdure.contract.context import Server
from perdure.contract.evaluation import predicted_labels, routed_mask
from perdure.contract.method import Method
from perdure.core.errors import UserError
from perdure.data.inputs import Inputs
from perdure.data.readers.text import hash_words
from perdure.data.tokenization import token_rows
from perdure.models.backbones import Card
from perdure.models.network import Network
from perdure.runs.model_rows import model_rows

_ROWS_PER_CHUNK = 1024


@dataclass(frozen=True)
class TrainedModel:
    """A trained model that predicts the class of new examples."""

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

    def predict(self, x: np.ndarray[Any, Any] | Tensor | Sequence[str]) -> np.ndarray[Any, Any]:
        """Predict the class of every example, without a task label.

        The prediction is routed if the method can route, else task-agnostic.

        Args:
            x: uint8 images of the size of the training data: [N, H, W], [N, H, W, C] or
                [N, C, H, W]. For a model that was trained on floats, numbers of the shape of the
                training data. For a model that was trained on texts, strings.

        Returns:
            Labels, int64 [N]; `class_names[label]` is the name of a class.

        Raises:
            UserError: `x` has another type or shape.
        """
        labels = [self._labels(chunk) for chunk in self._chunks(x)]
        return torch.cat(labels).numpy() if labels else np.zeros(0, dtype=np.int64)

    def predict_tasks(
        self, x: np.ndarray[Any, Any] | Tensor | Sequence[str]
    ) -> np.ndarray[Any, Any] | None:
        """Predict the task of every example, from 0: int64 [N]; -1 for no known task.

        None if the method cannot route. The argument and errors are those of `predict`, which
        predicts the class of an example of no known task among those of all tasks.
        """
        routes = [self._tasks(chunk) for chunk in self._chunks(x)]
        known = [tasks for tasks in routes if tasks is not None]
        if len(known) < len(routes):
            return None
        return torch.cat(known).numpy() if known else np.zeros(0, dtype=np.int64)

    def _chunks(self, x: np.ndarray[Any, Any] | Tensor | Sequence[str]) -> Iterator[Tensor]:
        inputs = Inputs(self._rows(x), self.shape, self.scale, self.shift)
        for index in torch.split(torch.arange(len(inputs)), _ROWS_PER_CHUNK):
            yield inputs.gather(index)

    def _tasks(self, x: Tensor) -> Tensor | None:
        return self.method.route(self.server, x, self.network)

    def _labels(self, x: Tensor) -> Tensor:
        outputs, routes = self.network.outputs, self._tasks(x)
        logits = self.method.predict(self.server, x, self.network)
        if routes is None:
            mask = outputs.seen_mask(self.last_task)
        else:
            mask = routed_mask(outputs, self.last_task, routes)
        return predicted_labels(logits, mask, outputs, self.last_task)

    def text_rows(self, texts: Sequence[str]) -> Tensor:
        """Return texts as inputs of the model: int32 tokens or uint8 word counts [N, values]."""
        if isinstance(self.config.model, TextModel):
            return token_rows(texts, self.config.model, self.shape[0], self.backbone)
        if len(self.shape) == 3:
            raise UserError(f"input: must be images of shape {self.shape}, got texts")
        return hash_words(texts, self.shape[0])

    def _rows(self, x: np.ndarray[Any, Any] | Tensor | Sequence[str]) -> Tensor:
        if isinstance(x, list | tuple) and all(isinstance(text, str) for text in x):
            x = self.text_rows(x)
        return model_rows(torch.as_tensor(x), self.shape, self.dtype)
