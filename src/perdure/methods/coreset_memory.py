"""A client's memory of earlier tasks: a few examples of each class, in the client's kept state.

The tree is {"memory": {task: {"x": [classes, most, *shape], "y": [classes], "count": [classes]}},
"seen": {output: rows so far}}: examples as the model gets them, by task and class, where "y" is the
output that answers for the class. Of a class at most `budget` examples are kept, over all tasks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from perdure.algebra.coresets import herding, literal, mixstyle, prototype, shares
from perdure.methods.base import Client
from perdure.trees import Tensors, Tree

Selection = Literal["herding", "literal", "random"]
Encode = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Keeper:
    """How examples are chosen at a task's end (eqs. 5 and 6)."""

    budget: int
    selection: Selection
    mixes: bool

    def after_task(self, client: Client) -> Tree:
        """The kept state with this task's examples."""
        memory: dict[str, Tensors] = dict(client.kept.get("memory", {}))
        seen: dict[str, int] = dict(client.kept.get("seen", {}))
        net, generator = client.net(), client.draw("coreset")
        chosen: dict[int, Tensor] = {}
        for output, index in rows_by_output(client).items():
            encode = _encoder(client, net.features)
            stored = stored_of(memory, output)
            before = seen.get(str(output), 0)
            picks = self._pick(client, encode, index, stored, before, generator)
            fresh = client.shard.inputs.gather(picks)
            if self.mixes and len(stored) >= self.budget:
                memory = _mixed(memory, output, fresh, generator)
            else:
                memory, room = self._make_room(memory, output, len(fresh))
                chosen[output] = fresh[:room]
            seen[str(output)] = before + len(index)
        if any(len(x) for x in chosen.values()):
            memory[str(client.place.task)] = packed(chosen)
        return {**client.kept, "memory": memory, "seen": seen}

    def _pick(
        self, client: Client, encode: Encode, index: Tensor, stored: Tensor, before: int,
        generator: torch.Generator,
    ) -> Tensor:  # fmt: skip
        """Row numbers of up to `budget` examples of one class, best first."""
        if self.selection == "random":
            order = torch.randperm(len(index), generator=generator).to(index.device)
            return index[order[: self.budget]]
        features = torch.cat(
            [encode(client.shard.inputs.gather(p)) for p in torch.split(index, 256)]
        )
        old = encode(stored) if len(stored) else None
        target = prototype(features, old, before)
        if self.selection == "herding":
            return index[herding(features, target, self.budget)]
        return index[literal(features, target, self.budget, old)]

    def _make_room(
        self, memory: dict[str, Tensors], output: int, fresh: int
    ) -> tuple[dict[str, Tensors], int]:
        """Space for a task's examples of a class that earlier tasks may have had, too.

        The class's budget is divided evenly over its tasks; chosen rows come best first, so what is
        given up is the least of each.
        """
        holders = [task for task, entry in memory.items() if _place(entry, output) is not None]
        if self.mixes:  # the class's memory is not full: fill it up
            return memory, min(fresh, self.budget - len(stored_of(memory, output)))
        share = max(1, self.budget // (len(holders) + 1))
        if len(holders) >= self.budget:
            return memory, 0
        cut = {task: _shortened(memory[task], output, share) for task in holders}
        return memory | cut, min(fresh, share)


def rows_by_output(client: Client) -> dict[int, Tensor]:
    """The client's rows of this task, by the output that should win."""
    targets = client.shard.targets[client.shard.index]
    outputs = sorted(set(targets.tolist()))
    return {output: client.shard.index[targets == output] for output in outputs}


def _encoder(client: Client, features: Callable[[Tensors, Tensor], Tensor]) -> Encode:
    def encode(x: Tensor) -> Tensor:
        with torch.no_grad():
            return features(client.params, x)

    return encode


def packed(chosen: dict[int, Tensor]) -> Tensors:
    """The examples of several classes as one tensor, padded with zeros."""
    there = {output: x for output, x in chosen.items() if len(x)}
    first = next(iter(there.values()))
    most = max(len(x) for x in there.values())
    stacked = first.new_zeros(len(there), most, *first.shape[1:])
    for row, x in enumerate(there.values()):
        stacked[row, : len(x)] = x
    count = torch.tensor([len(x) for x in there.values()], device=first.device)
    return {"x": stacked, "y": torch.tensor(list(there), device=first.device), "count": count}


def stored_of(memory: dict[str, Tensors], output: int) -> Tensor:
    """All stored examples of a class, over all tasks."""
    found = [entry["x"][p][: int(entry["count"][p])] for entry, p in _holding(memory, output)]
    return torch.cat(found) if found else torch.empty(0)


def _holding(memory: dict[str, Tensors], output: int) -> list[tuple[Tensors, int]]:
    places = [(entry, _place(entry, output)) for entry in memory.values()]
    return [(entry, place) for entry, place in places if place is not None]


def _place(entry: Tensors, output: int) -> int | None:
    """The row of a class in a task's entry."""
    found = (entry["y"] == output).nonzero().flatten().tolist()
    return int(found[0]) if found else None


def _shortened(entry: Tensors, output: int, share: int) -> Tensors:
    """An entry with at most `share` examples of a class."""
    rows = {
        int(y): x[: min(int(n), share if int(y) == output else int(n))]
        for x, y, n in zip(entry["x"], entry["y"], entry["count"], strict=True)
    }
    return packed(rows)


def _mixed(
    memory: dict[str, Tensors], output: int, fresh: Tensor, generator: torch.Generator
) -> dict[str, Tensors]:
    """Stored examples of a class that take on some of the style of new ones (eq. 6)."""
    changed = dict(memory)
    used = 0
    for task, entry in memory.items():
        place = _place(entry, output)
        if place is None:
            continue
        count = int(entry["count"][place])
        turn = torch.arange(used, used + count, device=fresh.device) % len(fresh)
        share = shares(count, generator).to(fresh.device)
        x = entry["x"].clone()
        x[place, :count] = mixstyle(x[place, :count], fresh[turn], share)
        changed[task], used = {**entry, "x": x}, used + count
    return changed


@dataclass(frozen=True)
class Past:
    """The memories of several clients that have as many past tasks, padded to one shape."""

    x: Tensor
    """[clients, tasks, classes, examples, *shape]"""
    y: Tensor
    """[clients, tasks, classes]"""
    count: Tensor
    """[clients, tasks, classes]; 0: no such class."""


def past_tasks(client: Client) -> list[Tensors]:
    """The entries of all tasks before the current one, in their order."""
    memory = client.kept.get("memory", {})
    return [memory[task] for task in sorted(memory, key=int) if int(task) < client.place.task]


def stack_past(clients: list[list[Tensors]]) -> Past:
    """The past of clients with the same number of tasks."""
    entries = [entry for mine in clients for entry in mine]
    classes = max(entry["x"].shape[0] for entry in entries)
    most = max(entry["x"].shape[1] for entry in entries)
    shape = entries[0]["x"].shape[2:]
    lead = (len(clients), len(clients[0]))
    return Past(
        _padded([entry["x"] for entry in entries], (classes, most, *shape), lead),
        _padded([entry["y"] for entry in entries], (classes,), lead),
        _padded([entry["count"] for entry in entries], (classes,), lead),
    )


def _padded(values: list[Tensor], shape: tuple[int, ...], lead: tuple[int, ...]) -> Tensor:
    if all(value.shape == shape for value in values):
        return torch.stack(values).view(*lead, *shape)
    out = values[0].new_zeros(len(values), *shape)
    for row, value in zip(out, values, strict=True):
        row[tuple(slice(extent) for extent in value.shape)] = value
    return out.view(*lead, *shape)
