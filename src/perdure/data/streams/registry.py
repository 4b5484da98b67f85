"""What arrives when: a stream of tasks, each divided over the clients.

Nobody knows the future: a task does not depend on how many tasks follow it. A stream of three
tasks is the first three tasks of a longer one, in its rows, its normalisation, and who holds them.
Where the config does not give them, two sizes are found from all tasks: how many classes a task has
(stream.classes_per_task) and the shape of domains that differ in it (data.size, data.channels).
The rows of a text model are padded to the longest text of all tasks.
"""

from __future__ import annotations

from perdure.config import Config
from perdure.core.rng import Rng
from perdure.data.streams.domains import domain_stream
from perdure.data.streams.permuted import permuted_stream
from perdure.data.streams.pool import pool_stream
from perdure.data.streams.split import split_stream
from perdure.data.streams.stream import EvalGroup, Stream, Task

__all__ = ["EvalGroup", "Stream", "Task", "make_stream", "resolve_normalization"]

_KINDS = {
    "permuted": permuted_stream,
    "split": split_stream,
    "domains": domain_stream,
    "pool": pool_stream,
}


def make_stream(config: Config, rng: Rng) -> Stream:
    """The stream that a config describes, with its data read and divided."""
    return _KINDS[config.stream.kind](resolve_normalization(config), rng)


def resolve_normalization(config: Config) -> Config:
    """A vit takes values of 0 to 1 as they are, unless the config says otherwise."""
    data = config.data
    if config.model.kind != "vit" or (data.normalize, data.mean, data.std) != (None, None, None):
        return config
    plain = data.model_copy(update={"normalize": False})
    return config.model_copy(update={"data": plain})
