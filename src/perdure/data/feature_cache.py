"""What is known of rows beforehand: computed once a row, kept, and gathered beside the inputs.

A frozen backbone gives the same features for a row in every epoch, round and evaluation.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from perdure.data.inputs import Inputs
from perdure.data.streams.stream import LazyTasks, Stream, Task

FeatureFunction = Callable[[Tensor], Tensor]
"""Inputs of a batch of rows to one vector a row."""
_BLOCK = 256
"""Rows that are computed together. Always the same ones: a result must not depend, not even in its
last bit, on which rows happened to be asked for first."""
_IN_MEMORY = 1 << 30
"""Bytes above which the vectors live in a memory-mapped temporary file."""


@dataclass(frozen=True)
class CacheStorage:
    """Where vectors are kept: one a row, and for each block whether it is there."""

    values: Tensor
    done: Tensor

    def put(self, block: int, first: int, values: Tensor) -> None:
        """Keep the vectors of a block."""
        self.values[first : first + len(values)] = values.to(self.values.device)
        self.done[block] = True


@dataclass(frozen=True)
class FileCacheStorage(CacheStorage):
    """Vectors in a file, for processes that come and go."""

    mapped: np.memmap[tuple[int], np.dtype[np.uint8]]

    def put(self, block: int, first: int, values: Tensor) -> None:
        """The mark that they are there comes after them on disk, too."""
        self.values[first : first + len(values)] = values.cpu()
        self.mapped.flush()
        self.done[block] = True


@dataclass(frozen=True)
class CacheFolder:
    """A folder for vectors that outlive the process."""

    folder: Path
    about: str
    """What identifies the vectors besides the rows: the backbone's hash."""

    def room(self, inputs: Inputs, size: int) -> FileCacheStorage:
        """The file for these very rows, made if it is not there."""
        rows, blocks = len(inputs), _blocks(inputs)
        path = self.folder / f"{self._name(inputs)}.known"
        if not path.is_file():
            self._make(path, 4 * rows * size + blocks)
        mapped = np.memmap(path, np.uint8, "r+", shape=(4 * rows * size + blocks,))
        whole = torch.from_numpy(mapped)
        values = whole[: 4 * rows * size].view(torch.float32).view(rows, size)
        return FileCacheStorage(values, whole[4 * rows * size :].view(torch.bool), mapped)

    def _name(self, inputs: Inputs) -> str:
        """A digest of the rows as a model gets them: other rows have another file."""
        digest = hashlib.sha256(f"{self.about} {inputs.shape} {inputs.rows.dtype}".encode())
        for part in (inputs.rows, inputs.scale, inputs.shift, inputs.permutation):
            if part is not None:
                digest.update(part.cpu().contiguous().numpy().data)
        return digest.hexdigest()[:32]

    def _make(self, path: Path, size: int) -> None:
        """Zeros, so that no block is there yet; at once, since two processes may do it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=self.folder, delete=False) as file:
            file.truncate(size)
        os.replace(file.name, path)


class FeatureCache:
    """One vector for each row of some inputs, computed when first asked for."""

    def __init__(
        self,
        inputs: Inputs,
        about: FeatureFunction,
        size: int,
        most: int = _IN_MEMORY,
        files: CacheFolder | None = None,
    ) -> None:
        self._inputs, self._about, self._size = inputs, about, size
        self._most, self._files = most, files

    @cached_property
    def _room(self) -> CacheStorage:
        if self._files is not None:
            return self._files.room(self._inputs, self._size)
        values = _space(len(self._inputs), self._size, self._inputs.rows.device, self._most)
        return CacheStorage(values, torch.zeros(_blocks(self._inputs), dtype=torch.bool))

    def gather(self, index: Tensor) -> Tensor:
        """The vectors of the rows at `index`: [*index.shape, size]."""
        room = self._room
        for block in torch.unique(index.reshape(-1) // _BLOCK).tolist():
            if not room.done[block]:
                self._compute(room, block)
        place = index.to(room.values.device).reshape(-1)
        return room.values.index_select(0, place).view(*index.shape, -1).to(index.device)

    def _compute(self, room: CacheStorage, block: int) -> None:
        first, last = block * _BLOCK, min((block + 1) * _BLOCK, len(self._inputs))
        rows = torch.arange(first, last, device=self._inputs.rows.device)
        room.put(block, first, self._about(self._inputs.gather(rows)))


def _blocks(inputs: Inputs) -> int:
    return -(-len(inputs) // _BLOCK)


def _space(rows: int, size: int, device: torch.device, most: int) -> Tensor:
    if rows * size * 4 <= most:
        return torch.empty(rows, size, device=device)
    with tempfile.TemporaryFile() as file:  # the mapping keeps it until nobody needs it any more
        return torch.from_numpy(np.memmap(file, np.float32, "w+", shape=(rows, size)))


def with_feature_cache(
    stream: Stream, about: FeatureFunction, size: int, files: CacheFolder | None = None
) -> Stream:
    """The stream with what is known of its rows; tasks over the same inputs share it.

    Tasks that are made when they are asked for stay so, and share by their `files` alone.
    """
    shared: dict[tuple[int, int], FeatureCache] = {}
    lasting = not isinstance(stream.tasks, LazyTasks)

    def told(inputs: Inputs) -> Inputs:
        key = (id(inputs.rows), id(inputs.permutation))
        known = shared.get(key) or FeatureCache(inputs, about, size, files=files)
        if lasting:
            shared[key] = known
        return replace(inputs, cached_features=known)

    def remembered(task: Task) -> Task:
        return replace(task, train=told(task.train), test=told(task.test))

    if lasting:
        return replace(stream, tasks=[remembered(task) for task in stream.tasks])
    made = stream.tasks
    return replace(stream, tasks=LazyTasks(len(made), lambda number: remembered(made[number])))
