"""The files of a trained model: export it to a folder, and load it for prediction."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from perdure.config import Config, read_saved
from perdure.contract.context import Server
from perdure.contract.method import Method
from perdure.core.documents import json_value
from perdure.core.errors import PerdureError, UserError
from perdure.core.files import sha256, sync, write_atomic
from perdure.core.registry import give_again
from perdure.core.states import partial_from_tree, to_tree
from perdure.core.trees import Tree, decode, encode
from perdure.data.examples import Examples, NumberScale
from perdure.deploy.custom_code import check_hashes, check_trust, code_hashes
from perdure.deploy.predictions import dtype_name
from perdure.deploy.trained_model import TrainedModel
from perdure.methods.registry import build
from perdure.models.adapter.module_body import ModuleBody
from perdure.models.layers import BodySetup
from perdure.models.network import Network, Outputs, make_network
from perdure.training.experiment import Experiment
from perdure.training.state import RunState

# ---- The card of a trained model, read from a file that anybody may have changed

_MAX_CLASSES = 1_000_000
_MAX_VALUES = 100_000_000
"""Values per input."""

Label = Annotated[int, Field(ge=0, lt=_MAX_CLASSES)]
Size = Annotated[int, Field(ge=1, le=_MAX_VALUES)]
Name = Annotated[str, Field(max_length=10_000)]


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class OutputsCard(_Part):
    """Outputs of the head."""

    kind: Literal["shared", "growing"]
    task_classes: list[list[Label]] = Field(min_length=1)
    known_classes: list[Label] | None


class NumbersCard(_Part):
    """Scale of numbers to predict."""

    mean: float
    std: float


class BackboneCard(_Part):
    """Pretrained weights of a backbone."""

    name: Name
    kind: Name
    config: dict[str, Any]
    sha256: Name


class ModelCard(_Part):
    """The content of card.json that prediction needs."""

    config: dict[str, Any]
    shape: list[Size] = Field(min_length=1, max_length=3)
    class_names: list[Name] = Field(max_length=_MAX_CLASSES)
    outputs: OutputsCard
    tasks_seen: Annotated[int, Field(ge=1)]
    backbone: BackboneCard | None
    code: dict[str, str]
    dtype: Literal["uint8", "float32", "int32"]
    features: list[Name] | None
    numbers: NumbersCard | None

    @model_validator(mode="after")
    def _check_sizes(self) -> ModelCard:
        groups = self.outputs.task_classes
        known = self.outputs.known_classes
        if math.prod(self.shape) > _MAX_VALUES:
            raise ValueError(f"shape: must have at most {_MAX_VALUES} values")
        if self.tasks_seen > len(groups):
            raise ValueError(f"tasks_seen is {self.tasks_seen} of {len(groups)} tasks")
        if any(label >= len(self.class_names) for group in groups for label in group):
            raise ValueError("outputs.task_classes: must be labels of class_names")
        if any(len(set(group)) < len(group) for group in groups):
            raise ValueError("outputs.task_classes: must be different in each task")
        if known and (len(known) < self.tasks_seen or max(known) > len(self.class_names)):
            raise ValueError("outputs.known_classes: must be counts of class_names, one per task")
        return self


def read_card(values: dict[str, Any]) -> ModelCard:
    """Return a checked card.

    Raises:
        ValueError: A key is missing or has another type; the text names it.

    """
    try:
        return ModelCard.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"{where}: {first['msg']}" if where else str(first["msg"])) from None


# ---- The files of a trained model: export it to a folder, and load it for prediction

_INPUT = {
    torch.uint8: "uint8 rows of this shape (channels first); normalized as in training",
    torch.float32: "rows of numbers of this shape (channels first); normalized as in training",
    torch.int32: "texts, or int32 rows of this many tokens from the backbone's tokenizer",
}
_WEIGHTS = "model.safetensors"
_NEXT = "next.safetensors"
"""Weights that are published by the card with their hash, and then renamed."""
_MAX_REASON = 300


def export_model(folder: Path, experiment: Experiment, state: RunState) -> None:
    """Write a trained model to a folder.

    model.safetensors contains the global parameters and the server state that prediction needs;
    card.json describes how to use it. A process that is killed leaves the earlier model or this
    one, never parts of both.
    """
    folder.mkdir(parents=True, exist_ok=True)
    server, examples = state.server, experiment.task(0).test
    assert isinstance(examples, Examples)
    assert examples.normalization is not None
    tree = {
        "params": server.params,
        "buffers": server.buffers,
        "state": prediction_state(experiment.method, server.state),
        "scale": examples.normalization.scale,
        "shift": examples.normalization.shift,
        **_constants(experiment.network),
    }
    data = encode(tree)
    outputs = experiment.network.outputs.until(state.task - 1)
    numbers = experiment.task(0).numbers
    dtype = torch.int32 if experiment.config.model.reads_text else examples.x.dtype
    card = {
        "config": experiment.config.model_dump(mode="json"),
        "shape": list(experiment.stream.shape),
        "class_names": list(experiment.stream.class_names[: outputs.classes]),
        "outputs": {
            "kind": outputs.kind,
            "task_classes": [list(c) for c in outputs.task_classes],
            "known_classes": outputs.known_classes,
        },
        "tasks_seen": state.task,
        "backbone": experiment.network.body.card,
        "sha256": sha256(data),
        "code": code_hashes(folder.parent),
        "dtype": dtype_name(dtype),
        "input": _INPUT[dtype],
        "features": experiment.stream.feature_names,
        "numbers": numbers and {"mean": numbers.mean, "std": numbers.std},
    }
    write_atomic(folder / _NEXT, data)
    write_atomic(folder / "card.json", (json.dumps(card, indent=2) + "\n").encode())
    os.replace(folder / _NEXT, folder / _WEIGHTS)
    sync(folder)


def _constants(network: Network) -> dict[str, Tree]:
    """Return the frozen parameters of a custom module, which nobody else keeps."""
    if not isinstance(network.body, ModuleBody) or not network.body.constants:
        return {}
    return {"constants": dict(network.body.constants)}


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


def load_model(path: str | Path, trust: bool = False, model: Any = None) -> TrainedModel:
    """Load the trained model of a run directory, or of its folder model/.

    Raises:
        UserError: There is no trained model, its files are damaged, or it needs code that is not
            trusted.

    Example:
        >>> model = perdure.load("runs/demo")  # doctest: +SKIP
        >>> model.class_names[model.predict(images)[0]]  # doctest: +SKIP
        '7'
    """
    folder = Path(path) / "model" if (Path(path) / "model").is_dir() else Path(path)
    values, tree = _read(folder)
    try:
        card = read_card(values)
        config = read_saved(card.config)
        give_again(config.model.kind, model)
        code = check_trust(config, folder.parent, trust)
        if code is not None:
            check_hashes(folder.parent, card.code)
        loaded = _model(config, card, tree, code)
        _try_prediction(loaded)
    except PerdureError:
        raise
    except Exception as error:  # whatever values do that do not fit together
        reason = f"{type(error).__name__}: {error}".partition("\n")[0][:_MAX_REASON]
        message = f"{folder / 'card.json'}: must describe a model ({reason})"
        raise UserError(message) from error
    return loaded


def _model(
    config: Config, card: ModelCard, tree: dict[str, Any], code: Path | None
) -> TrainedModel:
    backbone = card.backbone.model_dump() if card.backbone else None
    shape, setup = tuple(card.shape), BodySetup(code, reads_weights=False, card=backbone)
    method = build(config.method, code)
    _check_backbone(config, card)
    network = make_network(config.model, shape, _outputs(card), setup)
    if isinstance(network.body, ModuleBody) and "constants" in tree:
        network.body.constants = tree["constants"]
    state = partial_from_tree(method.ServerState, tree["state"], "server state")
    return TrainedModel(
        config=config,
        method=method,
        network=method.wrap_network(network),
        server=Server(tree["params"], tree["buffers"], state),
        class_names=tuple(card.class_names),
        shape=shape,
        scale=tree["scale"],
        shift=tree["shift"],
        last_task=card.tasks_seen - 1,
        backbone=backbone,
        dtype=getattr(torch, card.dtype),
        feature_names=tuple(card.features) if card.features else None,
        numbers=NumberScale(card.numbers.mean, card.numbers.std) if card.numbers else None,
    )


def _outputs(card: ModelCard) -> Outputs:
    known = card.outputs.known_classes
    return Outputs(
        card.outputs.kind, len(card.class_names), tuple(map(tuple, card.outputs.task_classes)),
        tuple(known) if known else None, card.numbers is not None,
    )  # fmt: skip


def _try_prediction(model: TrainedModel) -> None:
    """Predict one row, so that weights that do not fit their card are noticed when it is read.

    A backbone is not read for that.
    """
    if model.backbone is None and not model.config.model.reads_text:
        model.predict(torch.zeros(1, *model.shape, dtype=model.dtype))


def _check_backbone(config: Config, card: ModelCard) -> None:
    """Refuse weights of a backbone without a hash, which could be any file of this machine."""
    named = config.model.named_weights
    if named is not None and card.backbone is None:
        raise ValueError(f"the hash of the backbone {named} is missing")


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    try:
        card = json_value((folder / "card.json").read_bytes())
        data = _weights(folder, card)
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


def _weights(folder: Path, card: Any) -> bytes:
    """Return the weights that a card describes, also if a killed process did not rename them."""
    expected = card.get("sha256") if isinstance(card, dict) else None
    next_weights = folder / _NEXT
    if next_weights.is_file() and sha256(data := next_weights.read_bytes()) == expected:
        return data
    return (folder / _WEIGHTS).read_bytes()
