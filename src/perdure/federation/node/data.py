"""The local data of a node: one source per task, opened only when the task is current.

The folder holds `task-1`, `task-2`, ..., each as a folder of class folders with images, as a folder
with idx files, or as `task-1.npz`. Alternatively it holds a file `tasks.yaml`: a list with one
entry per task, as in the `data` section of a config, with paths relative to the folder.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from perdure.config import Config, DataConfig, change_source, parse
from perdure.core.documents import read_yaml_value
from perdure.core.errors import UserError, bad_value
from perdure.core.rng import Rng
from perdure.data.examples import Source
from perdure.data.load import load_source
from perdure.data.normalization import make_normalization, with_normalization
from perdure.data.partition import DisjointPartition, small_clients
from perdure.data.source import ConfigLocation
from perdure.data.streams.build import hold_out, resolve_normalization
from perdure.data.streams.stream import EvalGroup, LazyTasks, Stream, Task
from perdure.federation.messages import BadMessage
from perdure.federation.server.stream import (
    agreed_numbers,
    checked_federation,
    input_type,
    no_examples,
    task_classes,
)
from perdure.training.experiment import Experiment

log = logging.getLogger(__name__)


def local_stream(config: Config, folder: Path, number: int) -> Stream:
    """Return the stream of one node, in which only its client holds examples.

    Raises:
        UserError: The folder does not exist.
        BadMessage: When a task is opened, its data cannot be read or does not fit.

    """
    if not folder.is_dir():
        raise bad_value("--data", str(folder), "a folder that exists")
    config = resolve_normalization(config)
    federation, classes = checked_federation(config), task_classes(config)

    @lru_cache(maxsize=2)
    def make(task: int) -> Task:
        source = _read_task(config, folder, task, classes[task])
        local = _task(config, task, classes[task], source, number)
        return hold_out(local, config.data.validation, Rng(config.seed))

    tasks = LazyTasks(config.stream.tasks, make)
    names, shape = tuple(federation.classes), tuple(federation.shape)
    return Stream(config.stream.kind, tasks, names, shape, classes)


def local_size(experiment: Experiment, number: int, task: int) -> int:
    """Return the number of training examples of a task on a node; 0 if they are too few.

    Raises:
        BadMessage: The data cannot be read.

    """
    partition = experiment.task(task).partition
    small = small_clients(partition)
    if number in small:
        log.warning(
            "task %d: nothing is sent about %d rows: at least %d are required (policy.min_rows of "
            "node.yaml, privacy.min_rows of the run)",
            task + 1, small[number], experiment.min_rows,
        )  # fmt: skip
    return int(partition.sizes[number])


def find_source(config: Config, folder: Path, task: int) -> DataConfig | None:
    """Return the `data` section for a task, or None if the node has no data of it."""
    task_list = folder / "tasks.yaml"
    if task_list.is_file():
        return _from_list(config, task_list, task)
    base = folder / f"task-{task + 1}"
    if base.with_suffix(".npz").is_file():
        return _settings(config, {"source": "npz", "path": str(base.with_suffix(".npz"))})
    if not base.is_dir():
        return None
    is_idx = any("ubyte" in path.name for path in base.iterdir())
    return _settings(config, {"source": "idx" if is_idx else "folder", "path": str(base)})


def _from_list(config: Config, path: Path, task: int) -> DataConfig | None:
    entries = read_yaml_value(path)
    if not isinstance(entries, list):
        raise bad_value(str(path), type(entries).__name__, "a list with one entry per task")
    entry: Any = entries[task] if task < len(entries) else None
    if entry is None:
        return None
    if not isinstance(entry, dict) or not isinstance(entry.get("path"), str):
        raise bad_value(f"{path}: entry {task + 1}", entry, "a mapping with source and path")
    return _settings(config, {**entry, "path": str(path.parent / entry["path"])})


def _read_task(config: Config, folder: Path, task: int, allowed: tuple[int, ...]) -> Source | None:
    """Return the source of a task, or None if the node has no data of it.

    Raises:
        BadMessage: The data cannot be read. The reason is logged here, since it may name files.

    """
    try:
        settings = find_source(config, folder, task)
        return None if settings is None else _read(config, settings, task, allowed)
    except (UserError, OSError) as error:
        log.error("the data of task %d cannot be used: %s", task + 1, error)
        reason = f"its data of task {task + 1} cannot be used; the node's log says why"
        raise BadMessage(reason) from None


def _settings(config: Config, source: dict[str, Any]) -> DataConfig:
    """Return the node's source, read as the run's config says."""
    data = change_source(config.data, parse({"data": source}).data)
    return data.model_copy(update={"limit": None})


def _read(config: Config, settings: DataConfig, task: int, allowed: tuple[int, ...]) -> Source:
    numbers = config.data.target == "number"
    location = ConfigLocation(f"task-{task + 1}", task, None, numbers, is_node=True)
    source = load_source(settings, Rng(config.seed), location)
    federation = checked_federation(config)
    if source.shape != tuple(federation.shape):
        raise bad_value(f"{location.key}: shape", source.shape, f"{tuple(federation.shape)}")
    if source.train.x.is_floating_point() and input_type(config) == torch.uint8:
        raise bad_value(f"{location.key}: values", "float32", "uint8 for images in a federation")
    if location.numbers:
        return replace(source, class_names=tuple(federation.classes))
    indices = _class_indices(source.class_names, federation.classes, location.key)
    source = source.map(lambda part: replace(part, y=indices[part.y]))
    for label in torch.unique(torch.cat([source.train.y, source.test.y])).tolist():
        if label not in allowed:
            name = federation.classes[label]
            names = ", ".join(federation.classes[index] for index in allowed)
            raise bad_value(f"{location.key}: class", name, f"{names} (federation.tasks)")
    return replace(source, class_names=tuple(federation.classes))


def _class_indices(names: tuple[str, ...], agreed: list[str], key: str) -> Tensor:
    """Return the agreed class index of each class of a source: int64 [classes].

    Classes are found by name. A source without class names keeps its indices.
    """
    indices = {name: index for index, name in enumerate(agreed)}
    if all(name in indices for name in names):
        return torch.tensor([indices[name] for name in names])
    is_unnamed = names == tuple(str(index) for index in range(len(names)))
    if is_unnamed and len(names) <= len(agreed):
        return torch.arange(len(names))
    unknown = next(name for name in names if name not in indices)
    raise bad_value(f"{key}: class", unknown, ", ".join(agreed))


def _task(
    config: Config, task: int, classes: tuple[int, ...], source: Source | None, number: int
) -> Task:
    name, count = f"task {task + 1}", config.clients.count
    rows = 0 if source is None else len(source.train)
    offsets = np.where(np.arange(count + 1) > number, rows, 0)
    partition = DisjointPartition(torch.arange(rows), offsets)
    if source is None:
        none = no_examples(config)
        return Task(task, name, classes, none, none, partition, ())
    normalization, numbers = make_normalization(source.train.x, config.data), agreed_numbers(config)
    source = with_normalization(source, normalization, numbers)
    group = EvalGroup(torch.arange(len(source.test)), classes)
    train, test = source.train, source.test
    return Task(task, name, classes, train, test, partition, (group,), numbers=numbers)
