"""A client's replay memory: examples of its earlier tasks, stored as bytes, and draws from it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from perdure.contract.context import Client, ClientData
from perdure.contract.step import Batch, Rows, Step
from perdure.core.trees import Tensors
from perdure.data.examples import Examples
from perdure.models.ops import uniform_bits

_HASH_OFFSET = 1 << 20
"""Position at which draws from a memory are hashed, far from those of dropout in a model."""
_UNUSED_BITS = 53 - 32
"""Bits of a hash that are dropped: 32 of its 53 bits determine a row of the memory."""
_BATCH_ROWS = 256
"""Stored examples that are handed to other methods together."""


@dataclass(frozen=True)
class StoredExamples:
    """Examples of earlier tasks, with inputs in the order in which the model received them."""

    rows: Tensor
    """uint8 [examples, inputs] (float32 for floats, int32 for tokens): inputs before
    normalization."""
    targets: Tensor
    """int64 [examples]: output index."""
    tasks: Tensor
    """int64 [examples]: the row of `scale`, `shift` and `active_outputs` that applies."""
    scale: Tensor
    """float32 [tasks, inputs]: a model input is row * scale + shift."""
    shift: Tensor
    """float32 [tasks, inputs]: see `scale`."""
    active_outputs: Tensor | None = None
    """bool [tasks, outputs]: the outputs included in the loss of that task. If None, all."""

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True)
class ReplayMemory:
    """Client state: the stored examples."""

    examples: StoredExamples | None = None
    """None before the client's first finished task."""
    seen: int = 0
    """Number of examples of all finished tasks, stored or not."""
    task: int = -1
    """Index of the latest finished task, whose examples were added last."""

    def stored_batches(self, client: Client) -> Iterator[Batch]:
        """Yield the examples of the tasks before the client's current one.

        The weight of a row is the number of examples that it stands for: those seen per stored one.
        """
        stored, data = self.examples, client.data
        is_refilled = self.task == client.context.task
        if stored is None:
            return
        newest = len(stored.scale) - 1 if is_refilled else len(stored.scale)
        rows = (stored.tasks < newest).nonzero().flatten()
        seen = self.seen - is_refilled * len(data)
        for part in torch.split(rows, _BATCH_ROWS) if len(rows) else ():
            x = model_inputs(stored, part, example_shape(data))
            weight = torch.full((len(part),), seen / len(rows), device=x.device)
            yield Batch(x, stored.targets[part], weight=weight)


def store_examples(data: ClientData, index: Tensor) -> StoredExamples:
    """Return examples of the current task with everything that their replay needs.

    Args:
        data: The client's data of the task.
        index: int64 [examples]. Rows of the task's training set.

    """
    examples, active = _single_task(data), data.active_outputs
    order, normalization = examples.permutation, examples.normalization
    assert normalization is not None
    if order is None:
        order = torch.arange(examples.rows.shape[1], device=index.device)
    return StoredExamples(
        examples.rows[index][:, order],
        data.targets[index],
        torch.zeros_like(index),
        normalization.scale[order].unsqueeze(0),
        normalization.shift[order].unsqueeze(0),
        None if active is None else active.unsqueeze(0),
    )


def example_shape(data: ClientData) -> tuple[int, ...]:
    """Return the shape of one example, such as (C, H, W)."""
    return _single_task(data).shape


def _single_task(data: ClientData) -> Examples:
    assert isinstance(data.examples, Examples)  # joined examples are those of cumulative streams
    return data.examples


def join_examples(old: StoredExamples, remaining: Tensor, new: StoredExamples) -> StoredExamples:
    """Return some of the old examples, followed by the new ones of a later task."""
    remaining = remaining.to(new.rows.device)
    active = new.active_outputs
    if active is not None and old.active_outputs is not None:
        active = torch.cat([_with_later_outputs(old.active_outputs, active), active])
    return StoredExamples(
        torch.cat([old.rows[remaining], new.rows]),
        torch.cat([old.targets[remaining], new.targets]),
        torch.cat([old.tasks[remaining], new.tasks + len(old.scale)]),
        torch.cat([old.scale, new.scale]),
        torch.cat([old.shift, new.shift]),
        active,
    )


def model_inputs(examples: StoredExamples, positions: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return stored examples as the model received them: float32, or int32 for tokens.

    Args:
        examples: Stored examples.
        positions: int64 [n]. Which of them.
        shape: Shape of one example.

    """
    rows, tasks = examples.rows[positions], examples.tasks[positions]
    if rows.dtype != torch.int32:  # tokens are not normalized
        rows = rows.to(torch.float32) * examples.scale[tasks] + examples.shift[tasks]
    return rows.view(-1, *shape)


def raw_rows(examples: StoredExamples, positions: Tensor, inputs: Tensor) -> Tensor:
    """Return inputs of the model as rows before normalization: [n, inputs], of their type.

    Args:
        examples: Stored examples, whose normalization is undone.
        positions: int64 [n]. The examples that the inputs belong to.
        inputs: float32 [n, *shape].

    """
    tasks = examples.tasks[positions]
    rows = (inputs.flatten(1) - examples.shift[tasks]) / examples.scale[tasks]
    if examples.rows.is_floating_point():
        return rows
    return rows.round().clamp(0, 255).to(torch.uint8)


def replay_tensors(memory: ReplayMemory, data: ClientData, count: int) -> Tensors:
    """Return a memory as tensors for `replayed_rows`; an empty memory as one row of size 0."""
    stored, current = memory.examples, data.active_outputs
    examples = store_examples(data, data.index[:1]) if stored is None else stored
    if current is not None and examples.active_outputs is not None:
        active = past_active_outputs(examples.active_outputs, current)
        examples = replace(examples, active_outputs=active)
    values = {field.name: getattr(examples, field.name) for field in fields(examples)}
    size = torch.tensor(0 if stored is None else len(stored), device=data.index.device)
    drawn = torch.ones(count, device=data.index.device)
    tensors = {name: value for name, value in values.items() if value is not None}
    return tensors | {"size": size, "drawn": drawn}


def replayed_rows(step: Step) -> Rows:
    """Return rows drawn uniformly, with replacement, from a step's `replay_tensors`."""
    memory, batch_x = step.tensors, step.batch.x
    count = len(memory["drawn"])
    bits = uniform_bits(step.key, _HASH_OFFSET, count, batch_x.device)
    drawn = ((bits >> _UNUSED_BITS) * memory["size"]) >> 32  # uniform on 0 ... size - 1
    task, x = memory["tasks"][drawn], memory["rows"][drawn]
    if batch_x.is_floating_point():  # tokens are not normalized
        x = x.to(torch.float32) * memory["scale"][task] + memory["shift"][task]
    mask = (memory["size"] > 0).to(torch.float32).expand(count)
    active = memory["active_outputs"][task] if "active_outputs" in memory else None
    return Rows(x.reshape(-1, *batch_x.shape[1:]), memory["targets"][drawn], mask, active)


def with_share(rows: Rows, step: Step, share: float) -> Rows:
    """Return the rows with weights by which they have a share, in (0, 1), of the mean over all."""
    mask = torch.ones_like(step.batch.y) if step.batch.mask is None else step.batch.mask
    weight = mask.sum() * (share / (1 - share) / len(rows.mask))
    return replace(rows, weight=weight.expand(len(rows.mask)))


def past_active_outputs(past: Tensor, current: Tensor) -> Tensor:
    """Return the active outputs of stored examples of past tasks.

    They are those of the current examples if these include the past task's; else the past task's.
    So a loss over all outputs seen so far applies to stored examples too, and a loss within a task
    stays within the stored example's task.

    Args:
        past: bool [..., tasks, earlier outputs]. Active outputs of the past tasks at their time.
        current: bool [outputs] or [..., 1, outputs]. Active outputs of the current examples.

    Returns:
        bool [..., tasks, outputs].

    """
    past = _with_later_outputs(past, current)
    contained = (past & ~current).any(-1, keepdim=True).logical_not()
    return torch.where(contained, current, past)


def _with_later_outputs(past: Tensor, current: Tensor) -> Tensor:
    """Return masks with the outputs that were added later, which are not active."""
    return pad(past, (0, current.shape[-1] - past.shape[-1]))
