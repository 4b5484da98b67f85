"""A stack of clients in local training: their batches, parameters and optimizer state as one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from perdure.contract.context import Client
from perdure.contract.local_training import LocalTraining
from perdure.core.trees import Tensors
from perdure.engines.batch_schedule import BatchSchedule, batch_schedule, noise_key
from perdure.engines.optimizers import make_optimizer
from perdure.engines.stacked_transforms import NO_TRANSFORMS, Leaves, StackedTransforms, pad_stack
from perdure.engines.traced_steps import TracedSteps


@dataclass(frozen=True)
class StackSchedule:
    """The batches of a chunk: padded to one shape, clients with most steps first."""

    order: list[int]
    """Row of the stack -> position in the chunk."""
    rows: Tensor
    """int64 [steps, clients, batch]"""
    masks: Tensor
    """float [steps, clients, batch]: 0 for padding."""
    epochs: Tensor
    """int64 [steps, clients]"""
    active: list[int]
    """Number of clients that take each step."""

    @property
    def back(self) -> Tensor | None:
        """Position in the chunk -> row of the stack; None: they are the same."""
        if self.order == sorted(self.order):
            return None
        return torch.tensor(self.order).argsort()


def stack_schedule(schedules: list[BatchSchedule]) -> StackSchedule:
    """Pad the clients' schedules to one tensor."""
    order = sorted(range(len(schedules)), key=lambda position: -len(schedules[position]))
    longest, count = schedules[order[0]], len(schedules)
    # padding is a row of the task: any other row may have no output to answer it
    rows = longest.rows[0, 0].expand(len(longest), count, longest.rows.shape[1]).clone()
    sizes = torch.zeros(len(longest), count, dtype=torch.int64)
    epochs = longest.epochs.unsqueeze(1).repeat(1, count)
    for row, position in enumerate(order):
        schedule = schedules[position]
        rows[: len(schedule), row] = schedule.rows
        sizes[: len(schedule), row] = torch.tensor(schedule.sizes)
        epochs[: len(schedule), row] = schedule.epochs
    masks = torch.arange(rows.shape[2]) < sizes.unsqueeze(2)
    active = (sizes > 0).sum(1).tolist()
    return StackSchedule(order, rows, masks.to(rows.device, torch.float32), epochs, active)


def train_stack(
    training: LocalTraining, clients: list[Client], steps: TracedSteps
) -> tuple[Tensors, Tensors]:
    """Take the local steps of a chunk; return stacked parameters and running statistics."""
    schedule = stack_schedule([batch_schedule(client, training.config) for client in clients])
    stack = ClientStack(training, [clients[position] for position in schedule.order], steps)
    for number, active in enumerate(schedule.active):
        stack.step(schedule, number, active)
    back = schedule.back
    if back is None:
        return stack.params, stack.buffers
    return (
        {name: value[back] for name, value in stack.params.items()},
        {name: value[back] for name, value in stack.buffers.items()},
    )


class ClientStack:
    """Stacked clients in training."""

    def __init__(self, training: LocalTraining, clients: list[Client], steps: TracedSteps) -> None:
        self.count, data = len(clients), clients[0].data
        self.training, self.inputs, self.targets = training, data.inputs, data.targets
        prepared = [training.prepare_client(client) for client in clients]
        self.params = {
            name: _repeat(training.params[name], self.count) for name in training.trainable
        }
        for row, local in enumerate(prepared):
            for name, value in local.initial_params.items():
                self.params[name][row] = value
        self.buffers = {
            name: _repeat(value, self.count) for name, value in training.buffers.items()
        }
        self.tensors = {
            name: pad_stack([local.tensors[name] for local in prepared])
            for name in prepared[0].tensors
        }
        self.keys = torch.tensor([noise_key(client) for client in clients]).to(data.index.device)
        masks = [c.data.active_outputs for c in clients if c.data.active_outputs is not None]
        self.masks = {"active_outputs": torch.stack(masks)} if masks else {}
        self.transforms, self.after = NO_TRANSFORMS, list[int]()
        if prepared[0].transforms:
            self.transforms = StackedTransforms([p.transforms for p in prepared], steps.lift)
            self.after = training.step_transforms(self.transforms.templates)
        self.optimizer = make_optimizer(training.config)
        self.steps = steps.for_stack(training, self.transforms)

    def step(self, schedule: StackSchedule, number: int, active: int) -> None:
        """Take one local step of the first `active` clients.

        The lifted step runs on a rounded-up number of clients, so that few shapes are traced;
        what it computes for clients that have finished is not used.
        """
        width = rounded_width(active, self.count)
        arguments = self._arguments(schedule, number, width)
        grads, updates = self.steps.run(self._first(self.params, width), arguments, width)
        params = self._first(self.params, active)
        before = {name: p.clone() for name, p in params.items()} if self.after else {}
        grads = grads if width == active else [grad[:active] for grad in grads]
        self.optimizer.step(list(params.values()), grads, self.training.context.lr, active)
        if self.after:
            self._after_step(params, before, active)
        for name, value in updates.items():
            self.buffers[name][:active] = value[:active]

    def _first(self, stacked: Tensors, width: int) -> Tensors:
        """Return views of the first clients of the stack."""
        if width == self.count:
            return stacked
        return {name: value[:width] for name, value in stacked.items()}

    def _arguments(self, schedule: StackSchedule, number: int, width: int) -> dict[str, Any]:
        rows = schedule.rows[number, :width]
        cached = self.inputs.gather_cached(rows)
        return {
            "buffers": self._first(self.buffers, width),
            "x": self.inputs.gather(rows),
            "y": self.targets[rows],
            "mask": schedule.masks[number, :width],
            "epoch": schedule.epochs[number, :width],
            "key": self.keys[:width] + number,
            "tensors": self._first(self.tensors, width),
            "transforms": self._own_transforms(width),
            **self._first(self.masks, width),
            **({} if cached is None else {"cached_features": cached}),
        }

    def _own_transforms(self, width: int) -> list[Leaves]:
        return [self._first(leaves, width) for leaves in self.transforms.stacked]

    def _after_step(self, params: Tensors, before: Tensors, active: int) -> None:
        lr, transforms = self.training.context.lr, self.transforms

        def after(params: Tensors, before: Tensors, own: list[Leaves]) -> Tensors:
            built = transforms.build(transforms.shared, own)
            for position in self.after:
                params = params | built[position].on_step(params, before, lr)
            return params

        own = self._own_transforms(active)
        for name, value in torch.vmap(after)(params, before, own).items():
            params[name].copy_(value)


def _repeat(value: Tensor, count: int) -> Tensor:
    return value.detach().expand(count, *value.shape).clone()


def rounded_width(active: int, most: int) -> int:
    """Return the next power of two, capped: a chunk of any size has few distinct widths."""
    return min(most, 1 << (active - 1).bit_length())
