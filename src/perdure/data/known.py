"""What is known of rows beforehand: computed once a row, kept, and gathered beside the inputs.

A frozen backbone gives the same features for a row in every epoch, round and evaluation.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from perdure.data.inputs import Inputs
from perdure.data.tasks import Stream, Task

About = Callable[[Tensor], Tensor]
"""Inputs of a batch of rows to one vector a row."""
_BLOCK = 256
"""Rows that are computed together. Always the same ones: a result must not depend, not even in its
last bit, on which rows happened to be asked for first."""
_IN_MEMORY = 1 << 30
"""Bytes above which the vectors live in a memory-mapped temporary file."""


class Known:
    """One vector for each row of some inputs, computed when first asked for."""

    def __init__(self, inputs: Inputs, about: About, size: int, most: int = _IN_MEMORY) -> None:
        self._inputs, self._about = inputs, about
        self._values = _room(len(inputs), size, inputs.rows.device, most)
        self._done = torch.zeros(-(-len(inputs) // _BLOCK), dtype=torch.bool)

    def gather(self, index: Tensor) -> Tensor:
        """The vectors of the rows at `index`: [*index.shape, size]."""
        for block in torch.unique(index.reshape(-1) // _BLOCK).tolist():
            if not self._done[block]:
                self._compute(block)
        place = index.to(self._values.device).reshape(-1)
        return self._values.index_select(0, place).view(*index.shape, -1).to(index.device)

    def _compute(self, block: int) -> None:
        first, last = block * _BLOCK, min((block + 1) * _BLOCK, len(self._inputs))
        rows = torch.arange(first, last, device=self._inputs.rows.device)
        self._values[first:last] = self._about(self._inputs.gather(rows)).to(self._values.device)
        self._done[block] = True


def _room(rows: int, size: int, device: torch.device, most: int) -> Tensor:
    if rows * size * 4 <= most:
        return torch.empty(rows, size, device=device)
    with tempfile.TemporaryFile() as file:  # the mapping keeps it until nobody needs it any more
        return torch.from_numpy(np.memmap(file, np.float32, "w+", shape=(rows, size)))


def remembering(stream: Stream, about: About, size: int) -> Stream:
    """The stream with what is known of its rows; tasks over the same inputs share it."""
    shared: dict[tuple[int, int], Known] = {}

    def told(inputs: Inputs) -> Inputs:
        key = (id(inputs.rows), id(inputs.permutation))
        if key not in shared:
            shared[key] = Known(inputs, about, size)
        return replace(inputs, known=shared[key])

    def remembered(task: Task) -> Task:
        return replace(task, train=told(task.train), test=told(task.test))

    return replace(stream, tasks=[remembered(task) for task in stream.tasks])
