"""A client's coreset: a few stored examples per task and class, chosen at each task's end.

Equations 5 and 6 of STAMP. A class has a budget of examples over all tasks, which is divided evenly
among the tasks in which the class occurs; each of them keeps one example at least, so that every
past task has a gradient. With MixStyle, where a class comes again and its examples exceed the
budget, those of its earlier tasks take on the style of the new task's.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from perdure.algebra.coresets import (
    draw_mix_weights,
    herding,
    mixstyle,
    prototype,
    select_by_eq5,
    select_matching,
)
from perdure.contract import Client
from perdure.methods.parts.replay import (
    StoredExamples,
    example_shape,
    join_examples,
    model_inputs,
    raw_rows,
    store_examples,
)
from perdure.models.forward_pass import ForwardPass

Selection = Literal["matching", "herding", "literal", "random"]
"""How the examples of a class are chosen."""


@dataclass(frozen=True)
class CoresetMemory:
    """Client state: the stored examples, and how many they were chosen from."""

    examples: StoredExamples | None = None
    """Ordered by task, then by class, then from best to worst. None before the client's first
    finished task."""
    seen: dict[str, int] = field(default_factory=dict)
    """By output (its index as a string): number of examples of the class in all tasks so far."""


@dataclass(frozen=True)
class CoresetSelector:
    """Chooses the stored examples at a task's end."""

    budget: int
    """Stored examples per class, over all of its tasks."""
    selection: Selection
    """`matching`, `herding`, `literal` (eq. 5 to the letter) or `random`."""
    mixstyle: bool
    """Whether earlier examples of a class over its budget take on the style of new ones (eq. 6)."""

    def after_task(self, client: Client[CoresetMemory]) -> CoresetMemory:
        """Return the client's memory, with examples of the task that ends added."""
        if len(client.data) == 0:
            return client.state
        old, seen = client.state.examples, dict(client.state.seen)
        generator, rows = client.draw("coreset"), dict[int, Tensor]()
        for output, index in rows_by_output(client).items():
            rows[output] = self._choose_rows(client, output, index, generator)
            seen[str(output)] = seen.get(str(output), 0) + len(index)
        if old is None:
            return CoresetMemory(store_examples(client.data, torch.cat(list(rows.values()))), seen)
        return CoresetMemory(self._add(client, old, rows, generator), seen)

    def _choose_rows(
        self, client: Client[CoresetMemory], output: int, index: Tensor, generator: torch.Generator
    ) -> Tensor:
        """Return the rows of up to `budget` examples of one class, best first (eq. 5).

        If the examples of each task have the mean of the class in that task, the means of all
        tasks, weighted by their numbers of examples, are p^l: matching and herding aim at that.
        """
        if self.selection == "random":
            order = torch.randperm(len(index), generator=generator).to(index.device)
            return index[order[: self.budget]]
        batches = [client.data.inputs.gather(rows) for rows in torch.split(index, 256)]
        features = torch.cat([_features(client, x) for x in batches])
        if self.selection == "matching":
            return index[select_matching(features, prototype(features), self.budget, generator)]
        if self.selection == "herding":
            return index[herding(features, prototype(features), self.budget)]
        stored = _stored_features(client, output)
        target = prototype(features, stored, client.state.seen.get(str(output), 0))
        return index[select_by_eq5(features, target, self.budget, stored)]

    def _add(
        self,
        client: Client[CoresetMemory],
        old: StoredExamples,
        rows: dict[int, Tensor],
        generator: torch.Generator,
    ) -> StoredExamples:
        """Return the old examples that fit into the budgets, and those of the new rows."""
        remaining = torch.ones_like(old.targets, dtype=torch.bool)
        chosen, over_budget = list[Tensor](), list[int]()
        for output, index in rows.items():
            groups = task_groups(old, output)
            limits = divided_budget(self.budget, len(groups) + 1)
            for group, limit in zip(groups, limits, strict=False):
                remaining[group[limit:]] = False
            chosen.append(index[: limits[-1]])
            if groups and sum(map(len, groups)) + len(index) > self.budget:
                over_budget.append(output)
        new = store_examples(client.data, torch.cat(chosen))
        joined = join_examples(old, remaining.nonzero().squeeze(1), new)
        shape = example_shape(client.data)
        return mix_styles(joined, over_budget, shape, generator) if self.mixstyle else joined


def rows_by_output(client: Client[CoresetMemory]) -> dict[int, Tensor]:
    """Return the client's rows of this task by their correct output."""
    index = client.data.index
    targets = client.data.targets[index]
    return {output: index[targets == output] for output in sorted(set(targets.tolist()))}


def task_groups(examples: StoredExamples, output: int) -> list[Tensor]:
    """Return the positions of a class's examples for each of its tasks, in the order of tasks."""
    positions = (examples.targets == output).nonzero().squeeze(1)
    tasks = examples.tasks[positions]
    return [positions[tasks == task] for task in sorted(set(tasks.tolist()))]


def divided_budget(budget: int, tasks: int) -> list[int]:
    """Return the number of examples of a class for each of its tasks: equal up to 1, at least 1.

    The earliest tasks get what remains.
    """
    return [max((budget + tasks - 1 - position) // tasks, 1) for position in range(tasks)]


def mix_styles(
    examples: StoredExamples,
    outputs: list[int],
    shape: tuple[int, ...],
    generator: torch.Generator,
) -> StoredExamples:
    """Return the examples with styles of the last task's on earlier ones of some classes (eq. 6).

    Styles are those of the model's inputs. The result is rounded to the bytes of an image again,
    and cut off at 0 and 255.

    Args:
        examples: Stored examples.
        outputs: The classes, which occur in the last task and before.
        shape: Shape of one example.
        generator: Draws the weights lambda.
    """
    rows = examples.rows.clone()
    for output in outputs:
        *earlier, new = task_groups(examples, output)
        old = torch.cat(earlier)
        style = new[torch.arange(len(old), device=new.device) % len(new)]
        weights = draw_mix_weights(len(old), generator).to(new.device)
        content = model_inputs(examples, old, shape)
        mixed = mixstyle(content, model_inputs(examples, style, shape), weights)
        rows[old] = raw_rows(examples, old, mixed)
    return replace(examples, rows=rows)


def _stored_features(client: Client[CoresetMemory], output: int) -> Tensor | None:
    """Return the features of a class's stored examples, or None if there are none."""
    examples = client.state.examples
    groups = [] if examples is None else task_groups(examples, output)
    if examples is None or not groups:
        return None
    return _features(client, model_inputs(examples, torch.cat(groups), example_shape(client.data)))


def _features(client: Client[CoresetMemory], x: Tensor) -> Tensor:
    with torch.no_grad():
        return client.context.network.features(
            client.params, x, ForwardPass(buffers=client.buffers)
        )
