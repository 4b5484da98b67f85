"""A node's own data: one source a task, opened when the task is current and not before.

The folder holds `task-1`, `task-2`, ... each as a folder of class folders with images, as a folder
with idx files, or as `task-1.npz`; or a file `tasks.yaml`, a list with one entry a task as in the
`data` section of a config, with paths relative to the folder.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor

from perdure.config import Config, DataConfig, change_source, parse
from perdure.core.errors import UserError, bad_value
from perdure.core.rng import Rng
from perdure.data.inputs import make_inputs
from perdure.data.load import load_source
from perdure.data.partition import DisjointPartition
from perdure.data.source import ConfigLocation, Examples, Source
from perdure.data.streams import EvalGroup, Stream, Task, resolve_normalization
from perdure.data.streams.stream import LazyTasks
from perdure.flower.server_stream import agreement, blank_inputs, task_classes


def local_stream(config: Config, folder: Path, number: int) -> Stream:
    """The stream of one node: it alone holds rows."""
    if not folder.is_dir():
        raise bad_value("--data", str(folder), "a folder that exists")
    config = resolve_normalization(config)
    agreed, classes = agreement(config), task_classes(config)

    @lru_cache(maxsize=2)
    def make(task: int) -> Task:
        settings = find_source(config, folder, task)
        source = None if settings is None else _read(config, settings, task, classes[task])
        return _task(config, task, classes[task], source, number)

    tasks = LazyTasks(config.stream.tasks, make)
    names, shape = tuple(agreed.classes), tuple(agreed.shape)
    return Stream(config.stream.kind, tasks, names, shape, classes)


def find_source(config: Config, folder: Path, task: int) -> DataConfig | None:
    """Where a task's data is; None: the node has none of it."""
    listed = folder / "tasks.yaml"
    if listed.is_file():
        return _listed(config, listed, task)
    base = folder / f"task-{task + 1}"
    if base.with_suffix(".npz").is_file():
        return _settings(config, {"source": "npz", "path": str(base.with_suffix(".npz"))})
    if not base.is_dir():
        return None
    idx = any("ubyte" in path.name for path in base.iterdir())
    return _settings(config, {"source": "idx" if idx else "folder", "path": str(base)})


def _listed(config: Config, path: Path, task: int) -> DataConfig | None:
    entries = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(entries, list):
        raise bad_value(str(path), type(entries).__name__, "a list with one entry a task")
    entry: Any = entries[task] if task < len(entries) else None
    if entry is None:
        return None
    if not isinstance(entry, dict) or not isinstance(entry.get("path"), str):
        raise bad_value(f"{path}: entry {task + 1}", entry, "a mapping with source and path")
    return _settings(config, {**entry, "path": str(path.parent / entry["path"])})


def _settings(config: Config, source: dict[str, Any]) -> DataConfig:
    """Return the node's source, read as the run's config says."""
    return change_source(config.data, parse({"data": source}).data).model_copy(
        update={"limit": None}
    )


def _read(config: Config, settings: DataConfig, task: int, allowed: tuple[int, ...]) -> Source:
    location = ConfigLocation(f"task-{task + 1}", task)
    source = load_source(settings, Rng(config.seed), location)
    agreed = agreement(config)
    if source.shape != tuple(agreed.shape):
        raise bad_value(f"{location.key}: shape", source.shape, f"{tuple(agreed.shape)}")
    numbers = _numbers(source.classes, agreed.classes, location.key)
    train, test = (_relabelled(part, numbers) for part in (source.train, source.test))
    for label in torch.unique(torch.cat([train.y, test.y])).tolist():
        if label not in allowed:
            name = agreed.classes[label]
            names = ", ".join(agreed.classes[number] for number in allowed)
            raise bad_value(f"{location.key}: class", name, f"{names} (federation.tasks)")
    return Source(source.name, train, test, tuple(agreed.classes), source.texts)


def _numbers(found: tuple[str, ...], agreed: list[str], key: str) -> Tensor:
    """The agreed number of each of a source's labels: by name, or as it is where it has no name."""
    known = {name: number for number, name in enumerate(agreed)}
    if all(name in known for name in found):
        return torch.tensor([known[name] for name in found])
    if found == tuple(str(number) for number in range(len(found))) and len(found) <= len(agreed):
        return torch.arange(len(found))
    unknown = next(name for name in found if name not in known)
    raise UserError(f"{key}: class: must be {', '.join(agreed)}, got {unknown!r}")


def _relabelled(part: Examples, numbers: Tensor) -> Examples:
    return Examples(part.x, numbers[part.y])


def _task(
    config: Config, task: int, classes: tuple[int, ...], source: Source | None, number: int
) -> Task:
    name, count = f"task {task + 1}", config.clients.count
    rows = 0 if source is None else len(source.train)
    offsets = np.where(np.arange(count + 1) > number, rows, 0)
    shares = DisjointPartition(torch.arange(rows), offsets)
    if source is None:
        inputs, none = blank_inputs(config), torch.zeros(0, dtype=torch.int64)
        return Task(task, name, classes, inputs, none, inputs, none, shares, ())
    train, test = make_inputs(source.train.x, source.test.x, config.data, "data")
    group = EvalGroup(torch.arange(len(source.test)), classes)
    return Task(task, name, classes, train, source.train.y, test, source.test.y, shares, (group,))
