"""Feature cache: vectors that are computed once per row and gathered beside the inputs.

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

from perdure.data.examples import Examples
from perdure.data.streams.stream import LazyTasks, Stream, Task, map_tasks

FeatureFunction = Callable[[Tensor], Tensor]
"""Returns one vector per row of a batch of inputs: float32 [rows, size]."""
_BLOCK = 256
"""Rows that are computed together. The blocks are fixed, so that no bit of a result depends on
which rows are gathered first."""
_IN_MEMORY = 1 << 30
"""Bytes above which the vectors are stored in a memory-mapped temporary file."""


@dataclass(frozen=True)
class CacheStorage:
    """The vectors of all rows, and which of their blocks are computed."""

    values: Tensor
    """float32 [rows, size]."""
    done: Tensor
    """Whether a block is computed, bool [blocks]."""

    def put(self, block: int, first: int, values: Tensor) -> None:
        """Store the vectors of a block, float32 [rows of the block, size], from row `first` on."""
        self.values[first : first + len(values)] = values.to(self.values.device)
        self.done[block] = True


@dataclass(frozen=True)
class FileCacheStorage(CacheStorage):
    """Vectors in a file, which other processes reuse."""

    mapped: np.memmap[tuple[int], np.dtype[np.uint8]]
    """The content of the file."""

    def put(self, block: int, first: int, values: Tensor) -> None:
        """Store the vectors of a block; it is marked as done after they are on disk."""
        self.values[first : first + len(values)] = values.cpu()
        self.mapped.flush()
        self.done[block] = True


@dataclass(frozen=True)
class CacheFolder:
    """A folder with one file of vectors per set of rows."""

    folder: Path
    backbone: str
    """Hash of the backbone that computes the vectors."""

    def open_storage(self, examples: Examples, size: int) -> FileCacheStorage:
        """Return the storage for examples and vectors of `size`; its file is made if missing."""
        rows, blocks = len(examples), _blocks(examples)
        path = self.folder / f"{self._name(examples)}.features"
        if not path.is_file():
            self._create(path, 4 * rows * size + blocks)
        mapped = np.memmap(path, np.uint8, "r+", shape=(4 * rows * size + blocks,))
        content = torch.from_numpy(mapped)
        values = content[: 4 * rows * size].view(torch.float32).view(rows, size)
        return FileCacheStorage(values, content[4 * rows * size :].view(torch.bool), mapped)

    def _name(self, examples: Examples) -> str:
        """Return a hash of the backbone and of the normalized rows."""
        digest = hashlib.sha256(f"{self.backbone} {examples.shape} {examples.x.dtype}".encode())
        normalization = examples.normalization
        scales = () if normalization is None else (normalization.scale, normalization.shift)
        for tensor in (examples.rows, *scales, examples.permutation):
            if tensor is not None:
                digest.update(tensor.cpu().contiguous().numpy().data)
        return digest.hexdigest()[:32]

    def _create(self, path: Path, size: int) -> None:
        """Create a file of zeros atomically, since two processes may do so at once."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=self.folder, delete=False) as file:
            file.truncate(size)
        os.replace(file.name, path)


class FeatureCache:
    """One vector per row of some examples, computed when it is first gathered."""

    def __init__(
        self,
        examples: Examples,
        compute: FeatureFunction,
        size: int,
        max_bytes: int = _IN_MEMORY,
        folder: CacheFolder | None = None,
    ) -> None:
        self._examples, self._compute, self._size = examples, compute, size
        self._max_bytes, self._folder = max_bytes, folder

    @cached_property
    def _storage(self) -> CacheStorage:
        if self._folder is not None:
            return self._folder.open_storage(self._examples, self._size)
        device = self._examples.device
        values = _allocate(len(self._examples), self._size, device, self._max_bytes)
        return CacheStorage(values, torch.zeros(_blocks(self._examples), dtype=torch.bool))

    def gather(self, index: Tensor) -> Tensor:
        """Return the vectors of the rows at `index` (int64): float32 [*index.shape, size]."""
        storage = self._storage
        for block in torch.unique(index.reshape(-1) // _BLOCK).tolist():
            if not storage.done[block]:
                self._compute_block(storage, block)
        rows = index.to(storage.values.device).reshape(-1)
        return storage.values.index_select(0, rows).view(*index.shape, self._size).to(index.device)

    def _compute_block(self, storage: CacheStorage, block: int) -> None:
        first, last = block * _BLOCK, min((block + 1) * _BLOCK, len(self._examples))
        rows = torch.arange(first, last, device=self._examples.device)
        storage.put(block, first, self._compute(self._examples.gather(rows)))


def _blocks(examples: Examples) -> int:
    return -(-len(examples) // _BLOCK)


def _allocate(rows: int, size: int, device: torch.device, max_bytes: int) -> Tensor:
    if rows * size * 4 <= max_bytes:
        return torch.empty(rows, size, device=device)
    with tempfile.TemporaryFile() as file:  # the mapping keeps the content while it is used
        return torch.from_numpy(np.memmap(file, np.float32, "w+", shape=(rows, size)))


def with_feature_cache(
    stream: Stream, compute: FeatureFunction, size: int, folder: CacheFolder | None = None
) -> Stream:
    """Return the stream with a feature cache for the inputs of every task.

    Tasks over the same examples share a cache. Lazily made tasks stay lazy and share vectors only
    through `folder`.
    """
    caches: dict[tuple[int, int], FeatureCache] = {}
    is_lazy = isinstance(stream.tasks, LazyTasks)

    def with_cache(examples: Examples) -> Examples:
        key = (id(examples.x), id(examples.permutation))
        cache = caches.get(key) or FeatureCache(examples, compute, size, folder=folder)
        if not is_lazy:
            caches[key] = cache
        return replace(examples, cached_features=cache)

    def with_caches(task: Task) -> Task:
        return replace(task, train=task.train.map(with_cache), test=task.test.map(with_cache))

    return replace(stream, tasks=map_tasks(stream.tasks, with_caches))
