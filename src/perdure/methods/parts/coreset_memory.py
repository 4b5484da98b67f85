"""A client's coreset: a few stored examples per class of earlier tasks, chosen at each task's end.

Equations 5 and 6 of STAMP. At most `budget` examples per class are stored, over all tasks. With
MixStyle, the stored examples of a class whose budget is used up take on the style of new examples;
without MixStyle, the class's budget is divided among its tasks.
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
from perdure.methods.parts.replay import past_active_outputs
from perdure.models.forward_pass import ForwardPass

Selection = Literal["herding", "literal", "random"]
"""How the examples of a class are chosen."""
Entries = dict[str, Tensors]
"""Stored examples by task; see `CoresetMemory.memory`."""


@dataclass(frozen=True)
class CoresetMemory:
    """Client state: stored examples, normalized as the model receives them."""

    memory: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """By task (its index as a string): `x` [classes, examples, *shape], padded with zeros; `y`
    int64 [classes], the output of each class; `count` int64 [classes], examples that are not
    padding."""
    seen: dict[str, int] = field(default_factory=dict)
    """By output (its index as a string): number of examples of the class in all tasks so far."""


# ---- at a task's end


@dataclass(frozen=True)
class CoresetSelector:
    """Chooses the stored examples at a task's end."""

    budget: int
    """Stored examples per class, over all tasks."""
    selection: Selection
    """`herding`, `literal` (eq. 5 to the letter) or `random`."""
    mixstyle: bool
    """Whether stored examples of a full class take on the style of new ones (eq. 6)."""

    def after_task(self, client: Client) -> CoresetMemory:
        """Return the client's memory, with examples of the task that ends added."""
        memory: Entries = dict(client.state.memory)
        seen: dict[str, int] = dict(client.state.seen)
        generator, chosen = client.draw("coreset"), dict[int, Tensor]()
        for output, index in rows_by_output(client).items():
            before = seen.get(str(output), 0)
            stored = stored_examples(memory, output)
            rows = self._choose_rows(client, index, stored, before, generator)
            new = client.data.inputs.gather(rows)
            memory, chosen[output] = self._add(memory, output, new, generator)
            seen[str(output)] = before + len(index)
        if any(len(x) for x in chosen.values()):
            memory[str(client.context.task)] = pack_examples(chosen)
        return CoresetMemory(memory, seen)

    def _choose_rows(
        self, client: Client, index: Tensor, stored: Tensor, before: int, generator: torch.Generator
    ) -> Tensor:
        """Return the rows of up to `budget` examples of one class, best first (eq. 5)."""
        if self.selection == "random":
            order = torch.randperm(len(index), generator=generator).to(index.device)
            return index[order[: self.budget]]
        batches = [client.data.inputs.gather(rows) for rows in torch.split(index, 256)]
        features = torch.cat([_features(client, x) for x in batches])
        old = _features(client, stored) if len(stored) else None
        target = prototype(features, old, before)
        if self.selection == "herding":
            return index[herding(features, target, self.budget)]
        return index[select_by_eq5(features, target, self.budget, old)]

    def _add(
        self, memory: Entries, output: int, new: Tensor, generator: torch.Generator
    ) -> tuple[Entries, Tensor]:
        """Return the entries of earlier tasks after the update, and the new examples to store."""
        free = self.budget - len(stored_examples(memory, output))
        if self.mixstyle and free <= 0:
            return _mix_styles(memory, output, new, generator), new[:0]
        if self.mixstyle:  # use up the budget
            return memory, new[:free]
        return self._divide_budget(memory, output, new)

    def _divide_budget(self, memory: Entries, output: int, new: Tensor) -> tuple[Entries, Tensor]:
        """Divide a class's budget evenly among its tasks.

        Stored examples are sorted from best to worst, so each task drops its worst ones.
        """
        tasks = [task for task, entry in memory.items() if _position(entry, output) is not None]
        if len(tasks) >= self.budget:
            return memory, new[:0]
        per_task = self.budget // (len(tasks) + 1)
        shortened = {task: _shortened(memory[task], output, per_task) for task in tasks}
        return memory | shortened, new[:per_task]


def rows_by_output(client: Client) -> dict[int, Tensor]:
    """Return the client's rows of this task by their correct output."""
    index = client.data.index
    targets = client.data.targets[index]
    return {output: index[targets == output] for output in sorted(set(targets.tolist()))}


def _features(client: Client, x: Tensor) -> Tensor:
    with torch.no_grad():
        return client.context.network.features(
            client.params, x, ForwardPass(buffers=client.buffers)
        )


def pack_examples(chosen: dict[int, Tensor]) -> Tensors:
    """Return the examples of several classes as one entry of the memory.

    Args:
        chosen: By output the examples of its class, [examples, *shape]. Empty classes are dropped.
    """
    by_output = {output: x for output, x in chosen.items() if len(x)}
    x = pad_stack(list(by_output.values()))
    count = torch.tensor([len(examples) for examples in by_output.values()], device=x.device)
    return {"x": x, "y": torch.tensor(list(by_output), device=x.device), "count": count}


def stored_examples(memory: Entries, output: int) -> Tensor:
    """Return all stored examples of a class, [examples, *shape]."""
    positions = [(entry, _position(entry, output)) for entry in memory.values()]
    examples = [
        entry["x"][row, : int(entry["count"][row])] for entry, row in positions if row is not None
    ]
    return torch.cat(examples) if examples else torch.empty(0)


def _position(entry: Tensors, output: int) -> int | None:
    """Return the row of a class in a task's entry, or None if the entry lacks it."""
    rows = (entry["y"] == output).nonzero().flatten().tolist()
    return int(rows[0]) if rows else None


def _shortened(entry: Tensors, output: int, max_count: int) -> Tensors:
    """Return an entry with at most `max_count` examples of one class."""
    rows = zip(entry["x"], entry["y"].tolist(), entry["count"].tolist(), strict=True)
    return pack_examples({y: x[: min(n, max_count) if y == output else n] for x, y, n in rows})


def _mix_styles(memory: Entries, output: int, new: Tensor, generator: torch.Generator) -> Entries:
    """Return entries whose examples of a class take on some of the style of new ones (eq. 6)."""
    changed, used = dict(memory), 0
    for task, entry in memory.items():
        row = _position(entry, output)
        if row is None:
            continue
        count = int(entry["count"][row])
        styles = torch.arange(used, used + count, device=new.device) % len(new)
        weights = draw_mix_weights(count, generator).to(new.device)
        x = entry["x"].clone()
        x[row, :count] = mixstyle(x[row, :count], new[styles], weights)
        changed[task], used = {**entry, "x": x}, used + count
    return changed


# ---- in training


@dataclass(frozen=True)
class StackedCoresets:
    """The coresets of several clients with equally many past tasks, padded to one shape."""

    x: Tensor
    """float [clients, tasks, classes, examples, *shape]: stored examples."""
    y: Tensor
    """int64 [clients, tasks, classes]: output of each class."""
    count: Tensor
    """int64 [clients, tasks, classes]: examples that are not padding; 0 if there is no class."""


def group_by_past_tasks(clients: list[Client]) -> list[list[int]]:
    """Return positions of clients, grouped by their number of past tasks, without those of 0."""
    groups: dict[int, list[int]] = defaultdict(list)
    for position, client in enumerate(clients):
        groups[len(past_entries(client))].append(position)
    return [rows for tasks, rows in sorted(groups.items()) if tasks]


def past_entries(client: Client) -> list[Tensors]:
    """Return the entries of all tasks before the current one, in the order of tasks."""
    memory, task = client.state.memory, client.context.task
    return [memory[key] for key in sorted(memory, key=int) if int(key) < task]


def stack_coresets(clients: list[Client]) -> StackedCoresets:
    """Return the coresets of clients with equally many past tasks as one stack."""
    by_client = [past_entries(client) for client in clients]
    entries = [entry for entries in by_client for entry in entries]
    lead = (len(by_client), len(by_client[0]))
    stacks = (pad_stack([entry[name] for entry in entries]) for name in ("x", "y", "count"))
    return StackedCoresets(*(stack.view(*lead, *stack.shape[1:]) for stack in stacks))


def coreset_active_outputs(clients: list[Client], past: StackedCoresets) -> Tensor | None:
    """Return the active outputs of each past task, bool [clients, tasks, outputs].

    They follow those of training: all outputs (None), those seen so far, or those of one task.
    """
    masks = [client.data.active_outputs for client in clients]
    if masks[0] is None:
        return None
    current = torch.stack([mask for mask in masks if mask is not None]).unsqueeze(1)
    lead, device = past.y.shape[:2], current.device
    of_task = torch.zeros(*lead, current.shape[-1], dtype=torch.bool, device=device)
    for row in range(past.y.shape[2]):
        real = past.count[..., row : row + 1] > 0
        of_task |= torch.zeros_like(of_task).scatter(2, past.y[..., row : row + 1], real)
    return past_active_outputs(of_task, current)
