"""Export a trained model, and load it for prediction."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from perdure.config import Config, TextModel, read_saved
from perdure.contract.context import Server
from perdure.contract.evaluation import predicted_labels, routed_mask
from perdure.contract.method import Method
from perdure.contract.states import partial_from_tree, to_tree
from perdure.core.encoding import decode, encode
from perdure.core.errors import UserError
from perdure.core.files import sha256, write_atomic
from perdure.core.given import give_again
from perdure.core.trees import Tree
from perdure.data.inputs import Inputs
from perdure.data.readers.text import hash_words
from perdure.data.tokenization import token_rows
from perdure.methods import build
from perdure.models.adapter.build import ModuleSetup
from perdure.models.adapter.module_body import ModuleBody
from perdure.models.backbones import Card
from perdure.models.network import Network, make_network
from perdure.models.outputs import Outputs
from perdure.runs.custom_code import check_hashes, check_trust, code_hashes
from perdure.runs.model_rows import dtype_name, model_rows
from perdure.training.experiment import Experiment
from perdure.training.state import RunState

_ROWS_PER_CHUNK = 1024
_INPUT = {
    torch.uint8: "uint8 rows of this shape (channels first); normalized as in training",
    torch.float32: "rows of numbers of this shape (channels first); normalized as in training",
    torch.int32: "texts, or int32 rows of this many tokens from the backbone's tokenizer",
}
_EARLIER_DTYPES = ("uint8", "int32")
"""Type of the inputs of models without and with texts, in cards that do not name it."""


def export_model(folder: Path, experiment: Experiment, state: RunState) -> None:
    """Write a trained model to a folder.

    model.safetensors contains the global parameters and the server state that prediction needs;
    card.json describes how to use it.

    Args:
        folder: The folder, created if it does not exist.
        experiment: The experiment.
        state: The state of the run after at least one task.
    """
    folder.mkdir(parents=True, exist_ok=True)
    server, inputs = state.server, experiment.task(0).test
    assert isinstance(inputs, Inputs)
    tree = {
        "params": server.params,
        "buffers": server.buffers,
        "memory": prediction_state(experiment.method, server.state),
        "scale": inputs.scale,
        "shift": inputs.shift,
        **_constants(experiment.network),
    }
    data = encode(tree)
    outputs = experiment.network.outputs
    dtype = torch.int32 if experiment.config.model.kind == "text" else inputs.rows.dtype
    card = {
        "config": experiment.config.model_dump(mode="json"),
        "shape": list(experiment.stream.shape),
        "class_names": list(experiment.stream.class_names),
        "outputs": {"kind": outputs.kind, "task_classes": [list(c) for c in outputs.task_classes]},
        "tasks_seen": state.task,
        "backbone": experiment.network.backbone,
        "sha256": sha256(data),
        "code": code_hashes(folder.parent),
        "dtype": dtype_name(dtype),
        "input": _INPUT[dtype],
        "features": experiment.stream.feature_names,
    }
    write_atomic(folder / "model.safetensors", data)
    write_atomic(folder / "card.json", (json.dumps(card, indent=2) + "\n").encode())


def _constants(network: Network) -> dict[str, Tree]:
    """Return the frozen parameters of a custom module, which nobody else keeps."""
    if not isinstance(network.body, ModuleBody) or not network.constants:
        return {}
    return {"constants": dict(network.constants)}


def prediction_state(method: Method, state: Any) -> Tree:
    """Return the fields of a server state that `Needs.prediction_state` names, as a tree."""
    chosen: Tree = {}
    for path in method.needs.prediction_state:  # of a combination: `part.field`
        *parts, name = path.split(".")
        branch, values = chosen, state
        for part in parts:
            branch, values = branch.setdefault(part, {}), getattr(values, part)
        branch[name] = to_tree(getattr(values, name))
    return chosen


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


def load_model(path: str | Path, trust: bool = False, model: Any = None) -> TrainedModel:
    """Load the trained model of a run directory, or of its folder model/.

    Args:
        path: The run directory, or the folder.
        trust: Whether code of the run may be executed: custom methods and models. Its files and
            their hashes are logged first.
        model: The nn.Module or its class, if the run was made with one that cannot be imported.

    Raises:
        UserError: There is no trained model, its files are damaged, or it needs code that is not
            trusted.

    Example:
        >>> model = perdure.load("runs/demo")  # doctest: +SKIP
        >>> model.class_names[model.predict(images)[0]]  # doctest: +SKIP
        '7'
    """
    folder = Path(path) / "model" if (Path(path) / "model").is_dir() else Path(path)
    card, tree = _read(folder)
    try:
        config = read_saved(card["config"])
        give_again(config.model.kind, model)
        code = check_trust(config, folder.parent, trust)
        if code is not None:
            check_hashes(folder.parent, card.get("code", {}))
        return _model(config, card, tree, code)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f"{folder / 'card.json'}: must describe a model ({reason})") from None


def _model(
    config: Config, card: dict[str, Any], tree: dict[str, Any], code: Path | None
) -> TrainedModel:
    shape, setup = tuple(card["shape"]), ModuleSetup(code, reads_weights=False)
    classes = tuple(tuple(group) for group in card["outputs"]["task_classes"])
    outputs = Outputs(card["outputs"]["kind"], len(card["class_names"]), classes)
    method = build(config.method, code)
    if not 1 <= card["tasks_seen"] <= len(classes):
        raise ValueError(f"tasks_seen is {card['tasks_seen']} of {len(classes)} tasks")
    network = make_network(config.model, shape, outputs, card.get("backbone"), setup)
    if isinstance(network.body, ModuleBody) and "constants" in tree:
        network.body.constants = tree["constants"]
    state = partial_from_tree(method.ServerState, tree["memory"], "server state")
    return TrainedModel(
        config=config,
        method=method,
        network=method.wrap_network(network),
        server=Server(tree["params"], tree["buffers"], state),
        class_names=tuple(card["class_names"]),
        shape=shape,
        scale=tree["scale"],
        shift=tree["shift"],
        last_task=card["tasks_seen"] - 1,
        backbone=card.get("backbone"),
        dtype=getattr(torch, card.get("dtype") or _EARLIER_DTYPES[config.model.kind == "text"]),
        feature_names=tuple(card["features"]) if card.get("features") else None,
    )


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    try:
        card = json.loads((folder / "card.json").read_text(encoding="utf-8"))
        data = (folder / "model.safetensors").read_bytes()
    except FileNotFoundError:
        raise UserError(
            f"{folder}: contains no trained model (model.safetensors, card.json)"
        ) from None
    except ValueError:
        raise UserError(f"{folder / 'card.json'}: cannot be read as JSON") from None
    if not isinstance(card, dict):
        raise UserError(f"{folder / 'card.json'}: must be an object, got {card!r}")
    if sha256(data) != card.get("sha256"):
        raise UserError(f"{folder / 'model.safetensors'}: differs from the hash in card.json")
    return card, decode(data)
