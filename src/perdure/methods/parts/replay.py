"""A client's replay memory: examples of its earlier tasks, as bytes, and draws from it."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from perdure.contract import ClientData, Rows, Step
from perdure.core.trees import Tensors
from perdure.models.ops import uniform_bits

_PLACE = 1 << 20
"""Where draws from a memory are hashed, far from the places of dropout in a model."""
_SPARE = 53 - 32
"""Bits of a hash that are not needed: 32 of its 53 determine a row of the memory."""


@dataclass(frozen=True)
class StoredExamples:
    """Examples of earlier tasks, in the order of inputs that the model saw."""

    rows: Tensor
    """uint8 (int32 for tokens) [examples, inputs]"""
    targets: Tensor
    """int64 [examples]: output index."""
    tasks: Tensor
    """int64 [examples]: the row of `scale`, `shift` and `active_outputs` that applies."""
    scale: Tensor
    """float32 [tasks, inputs]: a model input is row * scale + shift."""
    shift: Tensor
    """float32 [tasks, inputs]"""
    active_outputs: Tensor | None = None
    """bool [tasks, outputs]: the outputs that were included in the loss; None: all."""

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True)
class ReplayMemory:
    """What a client keeps for replay."""

    examples: StoredExamples | None = None
    """None: the client has finished no task yet."""
    seen: int = 0
    """Examples of all tasks that the client has finished, in the memory or not."""


def store_examples(data: ClientData, index: Tensor) -> StoredExamples:
    """Return examples of the current task, with everything that their replay needs."""
    inputs, active = data.inputs, data.active_outputs
    order = inputs.permutation
    if order is None:
        order = torch.arange(inputs.rows.shape[1], device=index.device)
    return StoredExamples(
        inputs.rows[index][:, order],
        data.targets[index],
        torch.zeros_like(index),
        inputs.scale[order].unsqueeze(0),
        inputs.shift[order].unsqueeze(0),
        None if active is None else active.unsqueeze(0),
    )


def join_examples(old: StoredExamples, stay: Tensor, new: StoredExamples) -> StoredExamples:
    """Return the old examples at the positions `stay`, followed by the new ones of a later task."""
    stay = stay.to(new.rows.device)
    active = new.active_outputs
    if active is not None and old.active_outputs is not None:
        active = torch.cat([_widened(old.active_outputs, active), active])
    return StoredExamples(
        torch.cat([old.rows[stay], new.rows]),
        torch.cat([old.targets[stay], new.targets]),
        torch.cat([old.tasks[stay], new.tasks + len(old.scale)]),
        torch.cat([old.scale, new.scale]),
        torch.cat([old.shift, new.shift]),
        active,
    )


def replay_tensors(memory: ReplayMemory, data: ClientData) -> Tensors:
    """Return a memory as tensors for `replayed_rows`; an empty one as a row that does not count."""
    kept, today = memory.examples, data.active_outputs
    examples = store_examples(data, data.index[:1]) if kept is None else kept
    if today is not None and examples.active_outputs is not None:
        active = past_active_outputs(examples.active_outputs, today)
        examples = replace(examples, active_outputs=active)
    values = {field.name: getattr(examples, field.name) for field in fields(examples)}
    count = torch.tensor(0 if kept is None else len(kept), device=data.index.device)
    return {name: value for name, value in values.items() if value is not None} | {"count": count}


def replayed_rows(step: Step, count: int) -> Rows:
    """Return `count` rows drawn uniformly, with replacement, from a step's `replay_tensors`."""
    memory, like = step.tensors, step.batch.x
    bits = uniform_bits(step.key, _PLACE, count, like.device)
    drawn = ((bits >> _SPARE) * memory["count"]) >> 32  # uniform on 0 ... memory's count - 1
    task, x = memory["tasks"][drawn], memory["rows"][drawn]
    if like.is_floating_point():  # tokens are used as they are
        x = x.to(torch.float32) * memory["scale"][task] + memory["shift"][task]
    mask = (memory["count"] > 0).to(torch.float32).expand(count)
    active = memory["active_outputs"][task] if "active_outputs" in memory else None
    return Rows(x.reshape(-1, *like.shape[1:]), memory["targets"][drawn], mask, active)


def past_active_outputs(past: Tensor, today: Tensor) -> Tensor:
    """Return which outputs are included in the loss of replayed examples of past tasks.

    They are those of the past task, or today's where these contain them: replayed examples compete
    with all outputs seen so far if the current ones do, and within their task if losses are kept
    within a task.

    Args:
        past: bool [..., tasks, outputs at that time]: the outputs included then.
        today: bool [outputs] or [..., 1, outputs]: those of the current examples.
    """
    past = _widened(past, today)
    contained = (past & ~today).any(-1, keepdim=True).logical_not()
    return torch.where(contained, today, past)


def _widened(past: Tensor, today: Tensor) -> Tensor:
    """Return masks with the outputs that came later, which were not included."""
    return pad(past, (0, today.shape[-1] - past.shape[-1]))
