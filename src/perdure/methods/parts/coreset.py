"""A client's coreset: few stored examples per task and class, and gradients of tasks on them."""

from __future__ import annotations

from collections import defaultdict
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
from perdure.contract.context import Client
from perdure.contract.step import Batch, masked_mean, target_losses
from perdure.core.trees import Tensors, pad_stack
from perdure.methods.parts.replay import (
    StoredExamples,
    example_shape,
    join_examples,
    model_inputs,
    past_active_outputs,
    raw_rows,
    store_examples,
)
from perdure.models.network import Network
from perdure.models.ops import ForwardPass

# ---- A client's coreset: a few stored examples per task and class, chosen at each task's end
#
# Equations 5 and 6 of STAMP. A class has a budget of examples over all tasks, which is divided
# evenly among the tasks in which the class occurs; each of them keeps one example at least, so that
# every past task has a gradient. With MixStyle, where a class comes again and its examples exceed
# the budget, those of its earlier tasks take on the style of the new task's.

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
        batches = [client.data.examples.gather(rows) for rows in torch.split(index, 256)]
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


# ---- Gradients of earlier tasks, computed from clients' coresets (STAMP, eq. 3)

Gradients = Literal["sample", "prototype"]
"""Whether the loss of an earlier task is that of its stored examples or of its class prototypes."""


@dataclass(frozen=True)
class StackedCoresets:
    """The coresets of several clients with equally many past tasks, padded to one shape."""

    x: Tensor
    """float [clients, tasks, examples, *shape] (int32 for tokens): inputs of the model."""
    y: Tensor
    """int64 [clients, tasks, examples]: output index."""
    mask: Tensor
    """float32 [clients, tasks, examples]: 1 for an example, 0 for padding."""
    active_outputs: Tensor | None = None
    """bool [clients, tasks, outputs]: the outputs included in the loss. If None, all."""

    def tensors(self) -> list[Tensor]:
        """Return all that is not None, with clients and tasks as one axis."""
        values = (self.x, self.y, self.mask, self.active_outputs)
        return [value.flatten(0, 1) for value in values if value is not None]


def group_by_past_tasks(clients: list[Client]) -> list[list[int]]:
    """Return positions of clients, grouped by their number of past tasks, without those of 0."""
    groups: dict[int, list[int]] = defaultdict(list)
    for position, client in enumerate(clients):
        groups[len(stored_tasks(client))].append(position)
    return [rows for tasks, rows in sorted(groups.items()) if tasks]


def stored_tasks(client: Client) -> list[int]:
    """Return the tasks of the client's stored examples, as indices into its memory."""
    examples: StoredExamples | None = client.state.examples
    return [] if examples is None else sorted(set(examples.tasks.tolist()))


def stack_coresets(clients: list[Client]) -> StackedCoresets:
    """Return the coresets of clients with equally many past tasks as one stack."""
    entries = [_task_entry(client, task) for client in clients for task in stored_tasks(client)]
    x, y, mask = (pad_stack(list(values)) for values in zip(*entries, strict=True))
    x, y, mask = (stack.view(len(clients), -1, *stack.shape[1:]) for stack in (x, y, mask))
    return StackedCoresets(x, y, mask, coreset_active_outputs(clients))


def _task_entry(client: Client, task: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return x, y and mask of one task's stored examples."""
    examples: StoredExamples = client.state.examples
    positions = (examples.tasks == task).nonzero().squeeze(1)
    x = model_inputs(examples, positions, example_shape(client.data))
    return x, examples.targets[positions], torch.ones(len(positions), device=x.device)


def coreset_active_outputs(clients: list[Client]) -> Tensor | None:
    """Return the active outputs of each past task, bool [clients, tasks, outputs].

    They follow those of training: all outputs (None), those seen so far, or those of one task.
    """
    masks = list[Tensor]()
    for client in clients:
        past, current = client.state.examples.active_outputs, client.data.active_outputs
        if past is None or current is None:
            return None
        masks.append(past_active_outputs(past[stored_tasks(client)], current))
    return torch.stack(masks)


@dataclass(frozen=True)
class CoresetLoss:
    """The loss of one past task: the mean cross-entropy of its stored examples.

    With `gradients: prototype` it is eq. 3: the mean over classes c of CE(f(p_c), c), where p_c is
    the mean feature of the stored examples of class c.
    """

    network: Network
    """The network with the outputs so far."""
    fwd: ForwardPass
    """Circumstances of the forward pass."""
    gradients: Gradients
    """`sample` or `prototype`."""

    def __call__(
        self, params: Tensors, x: Tensor, y: Tensor, mask: Tensor, active: Tensor | None = None
    ) -> Tensor:
        """Return the loss, a scalar.

        Args:
            params: All parameters.
            x: [examples, *shape]. Stored examples.
            y: int64 [examples]. Output of each.
            mask: float [examples]. 1 for an example, 0 for padding.
            active: bool [outputs]. Active outputs. If None, all.

        """
        features = self.network.features(params, x, self.fwd)
        if self.gradients == "prototype":  # p_c for each example, of which a class counts once
            same_class = (y.unsqueeze(0) == y.unsqueeze(1)) * mask
            class_size = same_class.sum(1).clamp(min=1)
            features = same_class @ features / class_size.unsqueeze(1)
            mask = mask / class_size
        logits = self.network.classify(params, features, self.fwd)
        return masked_mean(target_losses(logits, Batch(x, y, mask, active)), mask)


def past_task_steps(clients: list[Client], update: Tensors, gradients: Gradients) -> Tensors:
    """Return minus lr times the gradients of past tasks at theta_u^E, [clients, tasks, ...].

    All clients and tasks are computed in one vmapped pass.
    """
    client, past = clients[0], stack_coresets(clients)
    lead = past.y.shape[:2]
    fwd = ForwardPass(buffers=client.buffers, stacked=True)
    task_loss = CoresetLoss(client.context.network, fwd, gradients)
    leaves = {
        name: (client.params[name] + value).repeat_interleave(lead[1], 0).requires_grad_()
        for name, value in update.items()
    }

    def loss(params: Tensors, *arguments: Tensor) -> Tensor:
        return task_loss(client.params | params, *arguments)

    with torch.enable_grad():
        losses = torch.vmap(loss)(leaves, *past.tensors())
    grads = torch.autograd.grad(losses.sum(), list(leaves.values()), materialize_grads=True)
    return {
        name: g.view(*lead, *g.shape[1:]) * -client.context.lr
        for name, g in zip(leaves, grads, strict=True)
    }
