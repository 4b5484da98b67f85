"""The trained model: written for who ships it, loaded to predict."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from perdure.config import Config, parse
from perdure.contract.context import Server
from perdure.contract.method import Method
from perdure.contract.states import partial_from_tree, to_tree
from perdure.core.encoding import decode, encode
from perdure.core.errors import UserError
from perdure.core.files import sha256, write_atomic
from perdure.core.trees import Tree
from perdure.data.inputs import Inputs
from perdure.data.readers.text import hashed
from perdure.data.tokenization import token_rows
from perdure.methods import build, parts_of
from perdure.models.backbones import Card
from perdure.models.network import Network, make_network
from perdure.models.outputs import Outputs
from perdure.runs.directory import custom_method_dir
from perdure.training.experiment import Experiment
from perdure.training.state import RunState

_ROWS = 1024
_INPUT = {
    "images": "uint8 rows of this shape (channels first); normalised as in training",
    "text": "texts, or int32 rows of this many tokens from the backbone's tokenizer",
}


def export_model(folder: Path, experiment: Experiment, state: RunState) -> None:
    """Write model.safetensors (the server's state) and card.json (how to use it)."""
    folder.mkdir(parents=True, exist_ok=True)
    server, inputs = state.server, experiment.task(0).train
    tree = {
        "params": server.params,
        "buffers": server.buffers,
        "memory": prediction_state(experiment.method, server.state),
        "scale": inputs.scale,
        "shift": inputs.shift,
    }
    data = encode(tree)
    outputs = experiment.network.outputs
    card = {
        "config": experiment.config.model_dump(mode="json"),
        "shape": list(experiment.stream.shape),
        "class_names": list(experiment.stream.class_names),
        "outputs": {"kind": outputs.kind, "task_classes": [list(c) for c in outputs.task_classes]},
        "tasks_seen": state.task,
        "backbone": experiment.network.backbone,
        "sha256": sha256(data),
        "input": _INPUT["text" if experiment.config.model.kind == "text" else "images"],
    }
    write_atomic(folder / "model.safetensors", data)
    write_atomic(folder / "card.json", (json.dumps(card, indent=2) + "\n").encode())


def prediction_state(method: Method, state: Any) -> Tree:
    """The fields of a server state that prediction needs, as a tree."""
    chosen: Tree = {}
    for path in method.needs.prediction_state:  # of a combination: `part.field`
        *parts, name = path.split(".")
        here, values = chosen, state
        for part in parts:
            here, values = here.setdefault(part, {}), getattr(values, part)
        here[name] = to_tree(getattr(values, name))
    return chosen


def save_custom_method(method: Method, run: Path) -> None:
    """Copy the file of a user's own method, so that the run can be resumed and used by itself."""
    for _, part in parts_of(method):
        _keep_source(part, run)


def _keep_source(method: Method, run: Path) -> None:
    module = sys.modules[type(method).__module__]
    source = getattr(module, "__file__", None)
    if source is None or module.__name__.partition(".")[0] in {"perdure", "__main__"}:
        return
    target = run / "method" / Path(*module.__name__.split(".")).with_suffix(".py")
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(target, Path(source).read_bytes())


@dataclass(frozen=True)
class TrainedModel:
    """A trained model with all that prediction needs."""

    config: Config
    method: Method
    network: Network
    server: Server
    class_names: tuple[str, ...]
    shape: tuple[int, ...]
    scale: Tensor
    shift: Tensor
    newest: int
    backbone: Card | None = None
    """What identifies the checkpoint that it is built on, if it is built on one."""

    def predict(self, x: np.ndarray[Any, Any] | Tensor | Sequence[str]) -> np.ndarray[Any, Any]:
        """The class of each row, without a task label: routed where the method can route.

        x: uint8 images as the training data had them: [N, H, W], [N, H, W, C] or [N, C, H, W]; for
        a model that was trained on texts, strings.
        """
        inputs = Inputs(self._rows(x), self.shape, self.scale, self.shift)
        parts = [
            self._classes(inputs, index) for index in torch.split(torch.arange(len(inputs)), _ROWS)
        ]
        return torch.cat(parts).numpy() if parts else np.zeros(0, dtype=np.int64)

    def _classes(self, inputs: Inputs, index: Tensor) -> Tensor:
        x, outputs = inputs.gather(index), self.network.outputs
        logits = self.method.predict(self.server, x, self.network)
        mask = outputs.seen_mask(self.newest)
        route = self.method.route(self.server, x, self.network)
        if route is not None:
            each = [outputs.task_mask(task, self.newest) for task in range(self.newest + 1)]
            mask = torch.stack(each)[route]
        best = logits.masked_fill(~mask, float("-inf")).argmax(1)
        return outputs.output_labels(self.newest)[best]

    def text_rows(self, texts: Sequence[str]) -> Tensor:
        """Texts as rows of the model's input."""
        if self.config.model.kind == "text":
            return token_rows(texts, self.config.model, self.shape[0], self.backbone)
        if len(self.shape) == 3:
            raise UserError(f"input: must be images of shape {self.shape}, got texts")
        return hashed(texts, self.shape[0])

    def _rows(self, x: np.ndarray[Any, Any] | Tensor | Sequence[str]) -> Tensor:
        if isinstance(x, list | tuple) and all(isinstance(text, str) for text in x):
            x = self.text_rows(x)
        rows = torch.as_tensor(x)
        allowed = torch.int32 if self.config.model.kind == "text" else torch.uint8
        if rows.dtype != allowed:
            name = str(allowed).removeprefix("torch.")
            raise UserError(f"input: must be {name}, got values of type {rows.dtype}")
        rows = self._channels_first(rows)
        return rows.reshape(len(rows), math.prod(self.shape)).contiguous()

    def _channels_first(self, rows: Tensor) -> Tensor:
        got = tuple(rows.shape[1:])
        if got == self.shape:
            return rows
        if len(self.shape) == 3:
            channels, height, width = self.shape
            if got == (height, width, channels):
                return rows.permute(0, 3, 1, 2)
            if (1, *got) == self.shape:
                return rows
        raise UserError(f"input: must be {self.shape}, got rows of shape {got}")


def load_model(path: str | Path) -> TrainedModel:
    """The trained model of a run directory (or of its model/ folder)."""
    folder = Path(path) / "model" if (Path(path) / "model").is_dir() else Path(path)
    card, tree = _read(folder)
    try:
        return _model(folder, card, tree)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f"{folder / 'card.json'}: is no card of a model ({reason})") from None


def _model(folder: Path, card: dict[str, Any], tree: dict[str, Any]) -> TrainedModel:
    config, shape = parse(card["config"]), tuple(card["shape"])
    classes = tuple(tuple(group) for group in card["outputs"]["task_classes"])
    outputs = Outputs(card["outputs"]["kind"], len(card["class_names"]), classes)
    method = build(config.method, custom_method_dir(folder.parent))
    if not 1 <= card["tasks_seen"] <= len(classes):
        raise ValueError(f"tasks_seen is {card['tasks_seen']} of {len(classes)} tasks")
    network = make_network(config.model, shape, outputs, card.get("backbone"))
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
        newest=card["tasks_seen"] - 1,
        backbone=card.get("backbone"),
    )


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    try:
        card = json.loads((folder / "card.json").read_text(encoding="utf-8"))
        data = (folder / "model.safetensors").read_bytes()
    except FileNotFoundError:
        raise UserError(
            f"{folder}: holds no trained model (model.safetensors, card.json)"
        ) from None
    except ValueError:
        raise UserError(f"{folder / 'card.json'}: cannot be read as JSON") from None
    if not isinstance(card, dict):
        raise UserError(f"{folder / 'card.json'}: must be an object, got {card!r}")
    if sha256(data) != card.get("sha256"):
        raise UserError(f"{folder / 'model.safetensors'}: differs from the hash in card.json")
    return card, decode(data)
