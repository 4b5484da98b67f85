"""A client's memory of earlier tasks: a few examples per class, chosen at each task's end.

Equations 5 and 6 of STAMP. Of a class at most `budget` examples are kept, over all tasks. With
MixStyle a class whose memory is full takes on the style of new examples; without it the class's
budget is divided over its tasks.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from perdure.algebra.coresets import draw_mix_weights, herding, mixstyle, prototype, select_by_eq5
from perdure.contract import Client
from perdure.core.trees import Tensors, pad_stack
from perdure.models.forward_pass import ForwardPass

Selection = Literal["herding", "literal", "random"]
Memory = dict[str, Tensors]


@dataclass(frozen=True)
class CoresetMemory:
    """Client state: the memory, with examples as the model gets them."""

    memory: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """By task (its index as text): `x` [classes, examples, *shape], padded with zeros; `y` int64
    [classes], the output of each class; `count` int64 [classes], examples that are not padding."""
    seen: dict[str, int] = field(default_factory=dict)
    """By output (its index as text): rows of the class in all tasks so far."""


# ---- at a task's end


@dataclass(frozen=True)
class CoresetSelector:
    """How examples are chosen at a task's end."""

    budget: int
    """Examples of a class, over all tasks."""
    selection: Selection
    mixstyle: bool

    def after_task(self, client: Client) -> CoresetMemory:
        """Return the client's memory with examples of the task that ends."""
        memory: Memory = dict(client.state.memory)
        seen: dict[str, int] = dict(client.state.seen)
        generator, chosen = client.draw("coreset"), dict[int, Tensor]()
        for output, index in rows_by_output(client).items():
            before = seen.get(str(output), 0)
            picks = self._pick(client, index, stored_examples(memory, output), before, generator)
            fresh = client.data.inputs.gather(picks)
            memory, chosen[output] = self._add(memory, output, fresh, generator)
            seen[str(output)] = before + len(index)
        if any(len(x) for x in chosen.values()):
            memory[str(client.context.task)] = pack_examples(chosen)
        return CoresetMemory(memory, seen)

    def _pick(
        self, client: Client, index: Tensor, stored: Tensor, before: int, generator: torch.Generator
    ) -> Tensor:
        """Return the rows of up to `budget` examples of one class, best first (eq. 5)."""
        if self.selection == "random":
            order = torch.randperm(len(index), generator=generator).to(index.device)
            return index[order[: self.budget]]
        parts = [client.data.inputs.gather(rows) for rows in torch.split(index, 256)]
        features = torch.cat([_encode(client, x) for x in parts])
        old = _encode(client, stored) if len(stored) else None
        target = prototype(features, old, before)
        if self.selection == "herding":
            return index[herding(features, target, self.budget)]
        return index[select_by_eq5(features, target, self.budget, old)]

    def _add(
        self, memory: Memory, output: int, fresh: Tensor, generator: torch.Generator
    ) -> tuple[Memory, Tensor]:
        """Return the earlier tasks' memory after new examples of a class, and those it keeps."""
        free = self.budget - len(stored_examples(memory, output))
        if self.mixstyle and free <= 0:
            return _mixed(memory, output, fresh, generator), fresh[:0]
        if self.mixstyle:  # fill it up
            return memory, fresh[:free]
        return self._divided(memory, output, fresh)

    def _divided(self, memory: Memory, output: int, fresh: Tensor) -> tuple[Memory, Tensor]:
        """Divide a class's budget evenly over its tasks.

        Chosen rows come best first, so that each task gives up its least good ones.
        """
        holders = [task for task, entry in memory.items() if _position(entry, output) is not None]
        if len(holders) >= self.budget:
            return memory, fresh[:0]
        share = self.budget // (len(holders) + 1)
        cut = {task: _shortened(memory[task], output, share) for task in holders}
        return memory | cut, fresh[:share]


def rows_by_output(client: Client) -> dict[int, Tensor]:
    """Return the client's rows of this task, by the output that should win."""
    index = client.data.index
    targets = client.data.targets[index]
    return {output: index[targets == output] for output in sorted(set(targets.tolist()))}


def _encode(client: Client, x: Tensor) -> Tensor:
    with torch.no_grad():
        return client.context.network.features(
            client.params, x, ForwardPass(buffers=client.buffers)
        )


def pack_examples(chosen: dict[int, Tensor]) -> Tensors:
    """Return the examples of several classes as one entry of the memory."""
    kept = {output: x for output, x in chosen.items() if len(x)}
    first = next(iter(kept.values()))
    most = max(len(x) for x in kept.values())
    stacked = first.new_zeros(len(kept), most, *first.shape[1:])
    for row, x in enumerate(kept.values()):
        stacked[row, : len(x)] = x
    count = torch.tensor([len(x) for x in kept.values()], device=first.device)
    return {"x": stacked, "y": torch.tensor(list(kept), device=first.device), "count": count}


def stored_examples(memory: Memory, output: int) -> Tensor:
    """Return all stored examples of a class, over all tasks."""
    places = [(entry, _position(entry, output)) for entry in memory.values()]
    found = [entry["x"][at, : int(entry["count"][at])] for entry, at in places if at is not None]
    return torch.cat(found) if found else torch.empty(0)


def _position(entry: Tensors, output: int) -> int | None:
    """Return the row of a class in a task's entry."""
    found = (entry["y"] == output).nonzero().flatten().tolist()
    return int(found[0]) if found else None


def _shortened(entry: Tensors, output: int, most: int) -> Tensors:
    """Return an entry with at most `most` examples of a class."""
    rows = zip(entry["x"], entry["y"].tolist(), entry["count"].tolist(), strict=True)
    return pack_examples({y: x[: min(n, most) if y == output else n] for x, y, n in rows})


def _mixed(memory: Memory, output: int, fresh: Tensor, generator: torch.Generator) -> Memory:
    """Return a memory whose examples of a class take on some of the style of new ones (eq. 6)."""
    changed, used = dict(memory), 0
    for task, entry in memory.items():
        at = _position(entry, output)
        if at is None:
            continue
        count = int(entry["count"][at])
        turn = torch.arange(used, used + count, device=fresh.device) % len(fresh)
        share = draw_mix_weights(count, generator).to(fresh.device)
        x = entry["x"].clone()
        x[at, :count] = mixstyle(x[at, :count], fresh[turn], share)
        changed[task], used = {**entry, "x": x}, used + count
    return changed


# ---- in training


@dataclass(frozen=True)
class StackedCoresets:
    """The memories of several clients with equally many past tasks, padded to one shape."""

    x: Tensor
    """[clients, tasks, classes, examples, *shape]"""
    y: Tensor
    """[clients, tasks, classes]"""
    count: Tensor
    """[clients, tasks, classes]; 0: no such class."""


def group_by_past_tasks(clients: list[Client]) -> list[list[int]]:
    """Return the positions of clients with equally many past tasks; those without are left out."""
    groups: dict[int, list[int]] = defaultdict(list)
    for position, client in enumerate(clients):
        groups[len(past_entries(client))].append(position)
    return [rows for tasks, rows in sorted(groups.items()) if tasks]


def past_entries(client: Client) -> list[Tensors]:
    """Return the entries of all tasks before the current one, in their order."""
    memory, task = client.state.memory, client.context.task
    return [memory[key] for key in sorted(memory, key=int) if int(key) < task]


def stack_coresets(clients: list[Client]) -> StackedCoresets:
    """Return the past of clients with equally many past tasks."""
    pasts = [past_entries(client) for client in clients]
    entries, lead = [entry for past in pasts for entry in past], (len(pasts), len(pasts[0]))
    stacks = (pad_stack([entry[name] for entry in entries]) for name in ("x", "y", "count"))
    return StackedCoresets(*(stack.view(*lead, *stack.shape[1:]) for stack in stacks))


def active_outputs(clients: list[Client], past: StackedCoresets) -> Tensor | None:
    """Return the outputs included in the loss of each past task, bool [clients, tasks, outputs].

    As in training: all of them (None), those seen so far, or those of the task alone.
    """
    masks = [client.data.active_outputs for client in clients]
    if masks[0] is None:
        return None
    today = torch.stack([mask for mask in masks if mask is not None]).unsqueeze(1)
    own = torch.zeros(*past.y.shape[:2], today.shape[-1], dtype=torch.bool, device=today.device)
    for row in range(past.y.shape[2]):
        real = past.count[..., row : row + 1] > 0
        own |= torch.zeros_like(own).scatter(2, past.y[..., row : row + 1], real)
    inside = (own & ~today).any(2, keepdim=True).logical_not()
    return torch.where(inside, today, own)
