"""Write the pages of docs/ that are made from the code: config.md, metrics.md, combinations.md.

python tools/reference.py
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from perdure.config import schema as config
from perdure.training.metrics import DEFINITIONS

sys.path.insert(0, str(Path(__file__).parent))
import combinations

DOCS = Path(__file__).resolve().parents[1] / "docs"

MEANINGS = {
    "seed": "Every random draw of the run derives from it.",
    "data": "What is read.",
    "data.source": "Where examples come from; digits come with scikit-learn.",
    "data.std": "As mean.",
    "data.normalize": "False: images are only brought from 0..255 to 0..1.",
    "data.channels": "Bring images to grey (1) or colour (3).",
    "data.image_column": "Hugging Face: the column of the images.",
    "data.label_column": "Hugging Face and text: the column of the labels.",
    "data.text_column": "Hugging Face and text: the column of the texts.",
    "stream": "What arrives when.",
    "stream.kind": "What makes a task: an order of the pixels, a group of classes, a domain, or "
    "a group of classes of each client's own.",
    "stream.tasks": "Number of tasks.",
    "stream.classes_per_task": "Split and pool; without it as many as go evenly into the tasks "
    "(the rest is unused).",
    "stream.domains.name": "What the domain is called.",
    "clients": "Who takes part.",
    "clients.count": "Clients in all.",
    "clients.per_round": "Clients sampled in a round; without it all.",
    "clients.partition": "Who holds what.",
    "clients.partition.kind": "How a task's examples are divided over the clients.",
    "clients.partition.alpha": "Dirichlet: small values make clients unequal.",
    "model": "What is trained.",
    "model.kind": "The network.",
    "model.hidden": "Sizes of the hidden layers (mlp).",
    "model.bias": "Whether layers have a bias.",
    "train": "How a client trains and how the server averages.",
    "train.rounds": "Rounds of a task.",
    "train.local_epochs": "Passes of a client over its data in a round.",
    "train.batch_size": "Examples in a step.",
    "train.lr": "Learning rate of the clients.",
    "train.optimizer": "The clients' optimiser; its state lives for one round.",
    "train.momentum": "Of sgd.",
    "train.weight_decay": "Added to the gradient; decoupled in adamw.",
    "train.schedule": "How the learning rate changes over a task's rounds.",
    "train.schedule.kind": "The shape of the change.",
    "engine": "Where client work runs.",
    "engine.kind": "Clients one after another, stacked, or whichever a short trial finds faster.",
    "privacy": "What clients hide of what they send; docs/privacy.md says from whom.",
    "runs": "What a run keeps on disk.",
    "device": "Where tensors live; auto takes the best there is.",
}
"""For keys whose name says it all and that therefore have no words in config.py."""


def config_page() -> str:
    """Every key of a config with its type, default and meaning."""
    lines = [
        "# The keys of a config",
        "",
        "A config is a YAML file of sections; nearly every key has a default, and a key that is",
        "not here is refused. `perdure run FILE --set section.key=value` changes one for a run.",
        "(This page is made from `src/perdure/config/schema.py` by `tools/reference.py`.)",
        "",
        "| key | type | default | meaning |",
        "|---|---|---|---|",
        *(_row(*found) for found in _keys(config.Config)),
        "",
        "`method` takes `kind` and the method's hyper-parameters: `perdure methods` lists them.",
    ]
    return "\n".join(lines) + "\n"


def metrics_page() -> str:
    """Every metric with its definition."""
    rows = [f"| {name} | {_cell(text)} |" for name, text in DEFINITIONS.items()]
    lines = [
        "# The metrics",
        "",
        "a[i][j] is the accuracy (0 to 1) on task j after learning task i, tasks counted from 1 to",
        "T. The word forgetting stands for several formulas in this field, so every number that",
        "perdure prints goes by one of these names. Metrics that compare two moments are null",
        "after one task. (This page is made from `src/perdure/training/metrics.py` by",
        "`tools/reference.py`.)",
        "",
        "| name | definition |",
        "|---|---|",
        *rows,
        "",
        "Each is given in up to three modes of inference: `task_agnostic` (the best of all outputs",
        "of the tasks so far), `task_aware` (the best of the outputs of the example's own task,",
        "which is told) and `routed` (the best of the outputs of the task that the method",
        "predicts).",
    ]
    return "\n".join(lines) + "\n"


PAGES: dict[str, Callable[[], str]] = {
    "config.md": config_page,
    "metrics.md": metrics_page,
    "combinations.md": combinations.page,
}

Key = tuple[str, FieldInfo, str]


def _keys(section: type[BaseModel], prefix: str = "") -> Iterator[Key]:
    """Every key below a section, with the words that follow it in config.py."""
    said = _docstrings(section)
    for name, field in section.model_fields.items():
        key = f"{prefix}{name}"
        yield key, field, said.get(name) or _meaning(key)
        inner = _section(field.annotation)
        if inner is config.DomainConfig:
            yield f"{key}.name", inner.model_fields["name"], MEANINGS[f"{key}.name"]
        elif inner is not None:
            yield from _keys(inner, f"{key}.")


def _meaning(key: str) -> str:
    if key not in MEANINGS:
        raise SystemExit(f"{key}: has no words in config.py, nor in MEANINGS here")
    return MEANINGS[key]


def _docstrings(section: type[BaseModel]) -> dict[str, str]:
    """The string that follows each field in the source of a class."""
    body = ast.parse(inspect.getsource(section)).body[0]
    assert isinstance(body, ast.ClassDef)
    found: dict[str, str] = {}
    for field, after in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr):
            assert isinstance(field.target, ast.Name)
            found[field.target.id] = ast.literal_eval(after.value)
    return found


def _section(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    found = (_section(part) for part in get_args(annotation))
    return next((section for section in found if section), None)


def _row(key: str, field: FieldInfo, meaning: str) -> str:
    kind = "; ".join(dict.fromkeys(_type(field.annotation) + _bounds(field.metadata)))
    return f"| `{key}` | {_cell(kind)} | {_default(field)} | {_cell(meaning)} |"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "must be given"
    value = field.default
    if value is None:
        return "-"
    if isinstance(value, BaseModel):
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value}`"


def _type(annotation: Any) -> list[str]:
    """A type in words, with its bounds."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if hasattr(annotation, "__metadata__"):
        return _type(parts[0]) + _bounds(parts[1:])
    if origin is Literal:
        return [" or ".join(str(part) for part in parts)]
    if origin in (Union, UnionType):
        kinds = ["; ".join(_type(part)) for part in parts if part is not NoneType]
        return [", or ".join(kinds)]
    if origin is list:
        return ["a list: " + "; ".join(_type(parts[0]))]
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return ["a data section" if annotation is config.DomainConfig else "a section"]
    names = {int: "whole number", float: "number", bool: "true or false", str: "text"}
    return [names.get(annotation, "a section")]


def _bounds(metadata: Any) -> list[str]:
    found = []
    for part in metadata:
        inner = getattr(part, "metadata", None)
        if inner:
            found += _bounds(inner)
        for kind, sign, name in (
            (Gt, ">", "gt"),
            (Ge, ">=", "ge"),
            (Lt, "<", "lt"),
            (Le, "<=", "le"),
        ):
            if isinstance(part, kind):
                found.append(f"{sign} {getattr(part, name)}")
    return found


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    for name, make in PAGES.items():
        (DOCS / name).write_text(make(), encoding="utf-8")
