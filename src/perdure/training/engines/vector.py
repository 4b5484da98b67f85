"""The vector engine: clients stacked and trained together, every tensor with a client axis."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from perdure.config import Config
from perdure.config.engine import EngineConfig
from perdure.config.section import PositiveInt
from perdure.contract.context import Client
from perdure.contract.exchanges import is_stacked
from perdure.contract.uploads import LocalUpdate, StackedUploads
from perdure.core.errors import refuse
from perdure.core.trees import Tensors, Tree, pad_stack, subtract
from perdure.training.engines.engine import InProcessEngine
from perdure.training.engines.serial import SerialEngine, upload_client
from perdure.training.engines.traced_steps import (
    NO_TRANSFORMS,
    Leaves,
    StackedTransforms,
    TracedSteps,
)
from perdure.training.local_training import (
    BatchSchedule,
    LocalTraining,
    SaveClient,
    augmentation_draws,
    batch_schedule,
    first_dropout_seed,
)
from perdure.training.optimizers import make_optimizer

# ---- Local training of a stack of clients: every tensor has a leading client axis


@dataclass(frozen=True)
class StackSchedule:
    """The batches of a chunk, padded to one shape; clients with the most steps come first."""

    order: list[int]
    """Position in the chunk of each row of the stack."""
    rows: Tensor
    """int64 [steps, clients, batch]: row numbers of the task's training set."""
    masks: Tensor
    """float [steps, clients, batch]: 0 for padding."""
    epochs: Tensor
    """int64 [steps, clients]: the epoch of each step, from 0."""
    active: list[int]
    """Number of clients that take each step; they are the first rows of the stack."""

    @property
    def inverse_order(self) -> Tensor | None:
        """Row of the stack of each position in the chunk. None if they are the same."""
        if self.order == sorted(self.order):
            return None
        return torch.tensor(self.order).argsort()


def stack_schedule(schedules: list[BatchSchedule]) -> StackSchedule:
    """Return the schedules of a chunk as one schedule of its stack."""
    order = sorted(range(len(schedules)), key=lambda position: -len(schedules[position].sizes))
    longest, count = schedules[order[0]], len(schedules)
    # padding must be a row of the task: the target of another row may not be an output yet
    steps = len(longest.sizes)
    rows = longest.rows[0, 0].expand(steps, count, longest.rows.shape[1]).clone()
    sizes = torch.zeros(steps, count, dtype=torch.int64)
    epochs = longest.epochs.unsqueeze(1).repeat(1, count)
    for row, position in enumerate(order):
        schedule = schedules[position]
        own = len(schedule.sizes)
        rows[:own, row] = schedule.rows
        sizes[:own, row] = torch.tensor(schedule.sizes)
        epochs[:own, row] = schedule.epochs
    masks = torch.arange(rows.shape[2]) < sizes.unsqueeze(2)
    active = (sizes > 0).sum(1).tolist()
    return StackSchedule(order, rows, masks.to(rows.device, torch.float32), epochs, active)


def train_stack(
    training: LocalTraining, clients: list[Client], steps: TracedSteps
) -> tuple[Tensors, Tensors]:
    """Take the local steps of a chunk of clients."""
    schedule = stack_schedule([batch_schedule(client, training.train_config) for client in clients])
    stack = ClientStack(training, [clients[position] for position in schedule.order], steps)
    stack.draw_augmentations(schedule)
    for number, active in enumerate(schedule.active):
        stack.step(schedule, number, active)
    stack.record_losses(schedule)
    order = schedule.inverse_order
    if order is None:
        return stack.params, stack.buffers
    return (
        {name: value[order] for name, value in stack.params.items()},
        {name: value[order] for name, value in stack.buffers.items()},
    )


class ClientStack:
    """A stack of clients in training."""

    def __init__(self, training: LocalTraining, clients: list[Client], steps: TracedSteps) -> None:
        self.clients, self.count, data = clients, len(clients), clients[0].data
        self.loss_sums = torch.zeros(self.count)
        self.draws: Tensor | None = None
        """float [steps, clients, batch, draws]: random numbers of augmentation."""
        self.training, self.examples, self.targets = training, data.examples, data.targets
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
        self.keys = torch.tensor([first_dropout_seed(client) for client in clients]).to(
            data.index.device
        )
        masks = [c.data.active_outputs for c in clients if c.data.active_outputs is not None]
        self.masks = {"active_outputs": torch.stack(masks)} if masks else {}
        self.transforms, self.step_transforms = NO_TRANSFORMS, list[int]()
        if prepared[0].transforms:
            by_client = [local.transforms for local in prepared]
            self.transforms = StackedTransforms(by_client, steps.varying_floats)
            self.step_transforms = training.step_transforms(self.transforms.templates)
        self.optimizer = make_optimizer(training.train_config)
        self.steps = steps.for_stack(training, self.transforms)

    def step(self, schedule: StackSchedule, number: int, active: int) -> None:
        """Take one local step of the first `active` clients.

        The step is computed for a rounded-up number of clients, so that few shapes are traced; the
        results of clients that have finished are not used.
        """
        width = rounded_width(active, self.count)
        arguments = self._arguments(schedule, number, width)
        grads, updates, losses = self.steps.run(self._first(self.params, width), arguments, width)
        self.loss_sums[:active] += losses[:active].cpu()
        params = self._first(self.params, active)
        before = {name: p.clone() for name, p in params.items()} if self.step_transforms else {}
        grads = grads if width == active else [grad[:active] for grad in grads]
        self.optimizer.step(list(params.values()), grads, self.training.context.lr, active)
        if self.step_transforms:
            self._transform_step(params, before, active)
        for name, value in updates.items():
            self.buffers[name][:active] = value[:active]

    def draw_augmentations(self, schedule: StackSchedule) -> None:
        """Draw the random numbers of every client's images, as it would alone."""
        steps, _, size = schedule.rows.shape
        by_client = []
        for row, client in enumerate(self.clients):
            own = sum(active > row for active in schedule.active)
            draws = augmentation_draws(self.training, client, own, size)
            if draws is None:
                return
            by_client.append(F.pad(draws, (0, 0, 0, 0, 0, steps - own)))
        self.draws = torch.stack(by_client, 1)

    def _images(self, rows: Tensor, number: int) -> Tensor:
        x, augmentation = self.examples.gather(rows), self.training.augmentation
        if self.draws is None or augmentation is None:
            return x
        return augmentation.apply(x, self.draws[number, : len(rows)], self.examples.black)

    def record_losses(self, schedule: StackSchedule) -> None:
        """Record the mean loss over the steps of every client."""
        for row, (client, total) in enumerate(zip(self.clients, self.loss_sums, strict=True)):
            steps = sum(active > row for active in schedule.active)
            self.training.losses[client.id] = client.weight, float(total) / max(steps, 1)

    def _first(self, stacked: Tensors, width: int) -> Tensors:
        """Return views of the first clients of the stack."""
        if width == self.count:
            return stacked
        return {name: value[:width] for name, value in stacked.items()}

    def _arguments(self, schedule: StackSchedule, number: int, width: int) -> dict[str, Any]:
        rows = schedule.rows[number, :width]
        cached = self.examples.gather_cached(rows)
        return {
            "buffers": self._first(self.buffers, width),
            "x": self._images(rows, number),
            "y": self.targets[rows],
            "mask": schedule.masks[number, :width],
            "epoch": schedule.epochs[number, :width],
            "key": self.keys[:width] + number,
            "tensors": self._first(self.tensors, width),
            "transforms": self._client_transforms(width),
            **self._first(self.masks, width),
            **({} if cached is None else {"cached_features": cached}),
        }

    def _client_transforms(self, width: int) -> list[Leaves]:
        return [self._first(leaves, width) for leaves in self.transforms.stacked]

    def _transform_step(self, params: Tensors, before: Tensors, active: int) -> None:
        lr, transforms = self.training.context.lr, self.transforms

        def after_step(params: Tensors, before: Tensors, stacked: list[Leaves]) -> Tensors:
            client_transforms = transforms.build(transforms.shared, stacked)
            for position in self.step_transforms:
                params = params | client_transforms[position].on_step(params, before, lr)
            return params

        stacked = self._client_transforms(active)
        for name, value in torch.vmap(after_step)(params, before, stacked).items():
            params[name].copy_(value)


def _repeat(value: Tensor, count: int) -> Tensor:
    return value.detach().expand(count, *value.shape).clone()


def rounded_width(active: int, count: int) -> int:
    """Return `active` rounded up to a power of two, at most `count`, so that few widths occur."""
    return min(count, 1 << (active - 1).bit_length())


# ---- The vector engine: clients stacked and trained together
#
# A chunk of clients is one stack of tensors with a leading client axis, on which each step is one
# function (see `traced_steps`). Clients may have different numbers of steps: within a chunk they
# are sorted by them, so that the clients that still train are always the first rows of the stack.

log = logging.getLogger(__name__)

_WEIGHT_BYTES, _ACTIVATION_BYTES = 21_000_000, 10_000_000
"""Largest weights and saved activations of a chunk. Larger chunks were measured to be slower, since
the stack no longer fits into the cache. Activations are written in every step and count more."""


class VectorEngineConfig(EngineConfig):
    """Clients are stacked and train at the same time.

    Example: `engine: {kind: vector, chunk: 10}`
    """

    chunk: PositiveInt | None = None
    """Clients trained as one stack. Default: as many as fit in the cache."""

    def make(self, config: Config) -> VectorEngine:
        """Return the engine."""
        return VectorEngine(self.chunk)


class VectorEngine(InProcessEngine):
    """Trains chunks of clients as one stack."""

    name = "vector"

    def __init__(self, chunk: int | None = None) -> None:
        self.chunk = chunk
        self._steps = TracedSteps()
        self._serial: SerialEngine | None = None
        """Trains in place of this engine if clients could not be stacked."""
        self._task_chunk = (-1, 0)
        """A task, and the chunk that was chosen for it."""

    def train(
        self, training: LocalTraining, clients: list[Client], save_client: SaveClient
    ) -> Iterator[StackedUploads]:
        """Train chunk after chunk, in the order of the clients."""
        task = training.context.task
        if self.chunk is None and self._task_chunk[0] != task:
            self._task_chunk = (task, chunk_size(training, clients[0]))
        size = self.chunk or self._task_chunk[1]
        for first in range(0, len(clients), size):
            yield from self._train_chunk(training, clients[first : first + size], save_client)

    def choice(self) -> Tree:
        """Return the chunk, and whether clients could not be stacked; both change the rounding."""
        serial = self._serial is not None
        return {"chunk": self.chunk, "serial": serial, "task_chunk": list(self._task_chunk)}

    def restore(self, choice: Tree) -> None:
        """Use the chunk of an earlier process, and train serially if it had to."""
        self._serial = SerialEngine() if choice["serial"] else None
        self._task_chunk = tuple(choice["task_chunk"])

    def _train_chunk(
        self, training: LocalTraining, clients: list[Client], save_client: SaveClient
    ) -> Iterator[StackedUploads]:
        reason = None if self._serial else training.context.network.body.vector_reason
        if self._serial is None and reason is None:
            try:
                params, buffers = train_stack(training, clients, self._steps)
            except (RuntimeError, NotImplementedError) as error:
                reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        if reason is not None:
            log.warning("the clients cannot be stacked and are trained serially: %s", reason)
            self._serial = SerialEngine()
        if self._serial is not None:
            yield from self._serial.train(training, clients, save_client)
        else:
            yield from upload_stack(training, clients, params, buffers, save_client)


def upload_stack(
    training: LocalTraining,
    clients: list[Client],
    params: Tensors,
    buffers: Tensors,
    save_client: SaveClient,
) -> Iterator[StackedUploads]:
    """Yield the uploads of a trained chunk, and save client states and private parameters.

    Uploads are yielded as one stack, unless the method's `make_upload` takes one client.
    """
    if training.train.make_upload is not None and not is_stacked(training.train.make_upload):
        for row, client in enumerate(clients):
            client_params = {name: value[row] for name, value in params.items()}
            client_buffers = {name: value[row] for name, value in buffers.items()}
            yield upload_client(training, client, client_params, client_buffers, save_client)
        return
    update = {name: params[name].sub_(training.params[name]) for name in training.sent}
    fields, states = training.make_upload(
        clients, LocalUpdate(update, subtract(buffers, training.buffers))
    )
    if states is not None and len(states) != len(clients):
        refuse(
            "make_upload: state",
            f"{len(states)} states",
            f"a list of {len(clients)}, one per client",
        )
    if states is not None or training.train.private:
        for row, client in enumerate(clients):
            private = {name: params[name][row].clone() for name in training.train.private}
            save_client(client.id, None if states is None else states[row], private)
    ids, weights = tuple(c.id for c in clients), tuple(c.weight for c in clients)
    yield StackedUploads(ids, weights, fields)


def chunk_size(training: LocalTraining, client: Client) -> int:
    """Return the number of clients whose weights and saved activations fit into the cache."""
    leaves = {name: training.params[name].clone().requires_grad_() for name in training.trainable}
    weights, saved = {leaf.data_ptr(): leaf.nbytes for leaf in leaves.values()}, 0
    shared = {tensor.data_ptr() for tensor in training.context.network.body.constants.values()}

    def count(tensor: Tensor) -> Tensor:
        nonlocal saved
        address = tensor.data_ptr()
        saved += 0 if address in weights or address in shared else tensor.nbytes
        return tensor

    zero = torch.zeros((), dtype=torch.int64)
    batch = client.data.batch(client.data.index[: training.train_config.batch_size], zero)
    local = training.prepare_client(client)
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        training.loss(leaves, training.buffers, batch, zero, training.broadcast, local)
    fits = min(_WEIGHT_BYTES // max(sum(weights.values()), 1), _ACTIVATION_BYTES // max(saved, 1))
    return max(2, fits)
