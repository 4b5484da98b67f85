"""Streams of tasks, each divided among the clients.

Nobody knows the future: a task does not depend on how many tasks follow it. A stream of three
tasks is the first three tasks of a longer one, in its examples, normalization and partition.
Two sizes that the config does not give are found from all tasks: the number of classes per task
(stream.classes_per_task) and the shape of domains that differ in it (data.size, data.channels).
The rows of a text model are padded to the longest text of all tasks.
"""

from __future__ import annotations

from dataclasses import replace

from perdure.config import Config
from perdure.core.rng import Rng
from perdure.data.streams.added_tasks import build_with_added
from perdure.data.streams.cumulative import make_cumulative
from perdure.data.streams.stream import EvalGroup, Stream, Task, map_tasks
from perdure.data.validation import hold_out

__all__ = ["EvalGroup", "Stream", "Task", "make_stream", "resolve_normalization"]


def make_stream(config: Config, rng: Rng) -> Stream:
    """Return the stream that a config describes, with its data read and divided."""
    stream = build_with_added(resolve_normalization(config), rng)
    fraction = config.data.validation
    if fraction:
        tasks = map_tasks(stream.tasks, lambda task: hold_out(task, fraction, rng))
        stream = replace(stream, tasks=tasks)
    return make_cumulative(stream) if config.stream.cumulative else stream


def resolve_normalization(config: Config) -> Config:
    """Return the config with `data.normalize: false` for a vit, unless the config sets it."""
    data = config.data
    if config.model.kind != "vit" or (data.normalize, data.mean, data.std) != (None, None, None):
        return config
    plain = data.model_copy(update={"normalize": False})
    return config.model_copy(update={"data": plain})
