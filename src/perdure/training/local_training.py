"""Local training as every engine runs it: batches, the loss of a step, its gradient, the upload."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from dataclasses import field as dataclass_field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from perdure.algebra import subspaces
from perdure.config import TrainConfig
from perdure.contract.context import Client, Context
from perdure.contract.exchanges import Prepared, Train
from perdure.contract.step import Batch, Step, join_rows, mean_loss, mean_target_loss
from perdure.contract.transforms import ProjectOut, Transform, check_tensors
from perdure.contract.uploads import ClientResult, Each, LocalUpdate, Losses, Sum, Upload
from perdure.core.errors import refuse, type_name
from perdure.core.trees import Tensors, Tree
from perdure.data.images import Augmentation
from perdure.models.ops import ForwardPass

Transforms = tuple[Transform, ...]
SaveClient = Callable[[int, Any, Tensors], None]
"""Saves, by client id, a client's new state (if None, unchanged) and its private parameters."""
_NOTHING_PREPARED = Prepared()


@dataclass
class LocalTraining:
    """Everything that all clients of a training round share."""

    train: Train
    """The functions and facts that the method declared."""
    context: Context
    """Position in the run."""
    train_config: TrainConfig
    """The `train` section of the config."""
    params: Tensors
    """All parameters of the global model."""
    buffers: Tensors
    """Its running statistics."""
    broadcast: Tree
    """The fields that the server sent, and the global model as `params`."""
    per_client_fields: tuple[str, ...] = ()
    """Names of the fields that may be an Each."""
    fast: bool = True
    """Whether projections may be done on layer inputs; false only to measure the gain."""
    augmentation: Augmentation | None = None
    """Random changes of the images in local steps. If None, there are none."""
    losses: Losses = dataclass_field(default_factory=dict)
    """Filled in by engines: weight and mean training loss of each client that has trained."""

    def __post_init__(self) -> None:
        chosen, config = self.train.trainable, self.train_config
        self.trainable = self.context.trainable if chosen is None else chosen
        """Names of the parameters that are trained."""
        self.sent = tuple(name for name in self.trainable if name not in self.train.private)
        """Names of the trained parameters that are sent."""
        self.decay = 0.0 if config.optimizer.decouples_decay else config.weight_decay
        """Weight decay that is added to the gradient before a method sees it."""

    # ---- before the steps

    def prepare_client(self, client: Client) -> Prepared:
        """Return the checked result of `prepare`, with the client's private parameters."""
        if self.train.prepare is None and not self.train.private:
            return _NOTHING_PREPARED
        local = _NOTHING_PREPARED if self.train.prepare is None else self.train.prepare(client)
        if not isinstance(local, Prepared):
            refuse("prepare", type_name(local), "a Prepared")
        private = {name: client.params[name] for name in self.train.private}
        local = replace(local, initial_params=private | local.initial_params)
        self._check_prepared(local)
        return replace(local, transforms=tuple(self._as_projector(t) for t in local.transforms))

    def _check_prepared(self, local: Prepared) -> None:
        shapes = {name: self.context.parameters[name] for name in self.trainable}
        check_tensors("prepare: initial_params", local.initial_params, shapes)
        for transform in local.transforms:
            transform.check(self.context.parameters)
        layouts = {
            "tensors": sorted((n, str(t.dtype), t.dim()) for n, t in local.tensors.items()),
            "transforms": [transform.settings() for transform in local.transforms],
        }
        for field, layout in layouts.items():
            first = self._first_layouts.setdefault(field, layout)
            if layout != first:
                refuse(f"prepare: {field}", f"{layout} for one client and {first} for another",
                       "the same names and kinds for all clients (a transform without any "
                       "parameter, such as ProjectOut({}), does nothing)")  # fmt: skip

    @cached_property
    def _first_layouts(self) -> dict[str, Any]:
        return {}

    def _as_projector(self, transform: Transform) -> Transform:
        """Return a ProjectOut of broadcast subspaces with projectors, which are cheaper per step.

        Other transforms are returned unchanged. A projector is computed once per round.
        """
        if type(transform) is not ProjectOut:
            return transform
        bases = {name: next(iter(s.values())) for name, s in transform.subspaces.items()}
        if not all(id(basis) in self._broadcast_ids for basis in bases.values()):
            return transform
        for name, basis in bases.items():
            if id(basis) not in self._projectors:
                self._projectors[id(basis)] = subspaces.projector(transform.subspaces[name])
        projectors = {name: self._projectors[id(basis)] for name, basis in bases.items()}
        return ProjectOut(projectors, broadcast=True)

    @cached_property
    def _broadcast_ids(self) -> set[int]:
        return {id(leaf) for leaf in tree_leaves(self.broadcast)}

    @cached_property
    def _projectors(self) -> dict[int, Tensors]:
        return {}

    # ---- a step

    def loss(
        self,
        params: Tensors,
        buffers: Tensors,
        batch: Batch,
        key: Tensor,
        broadcast: Tree,
        local: Prepared,
        stacked: bool = False,
    ) -> tuple[Tensor, Tensors]:
        """Return the loss of one step and the new running statistics."""
        train = self.train
        network = self.context.network
        if batch.cached_features is not None:
            network = network.with_cached_features(batch.cached_features)
        fwd = ForwardPass(
            train=True,
            buffers=buffers,
            batch_statistics=train.batch_statistics,
            key=key,
            mask=batch.mask,
            stacked=stacked,
            input_projections=self.input_projections(local.transforms) if local.transforms else {},
        )
        all_params = {**broadcast["params"], **params}
        step = Step(all_params, batch, broadcast, local.tensors, key, network, fwd)
        if train.extra_rows is not None:
            step = join_rows(step, train.extra_rows(step))
        if train.loss is None:
            total = mean_target_loss(step.logits(), step.batch)
        else:
            total = mean_loss("loss", train.loss(step), step)
        if train.penalty is not None:
            total = total + mean_loss("penalty", train.penalty(step), step)
        return total, step.fwd.updates

    def decay_transform_clip(
        self, grads: Tensors, params: Tensors, broadcast: Tree, transforms: Transforms
    ) -> Tensors:
        """Return the optimizer's gradient: with weight decay, transforms and clipping applied."""
        if self.decay:
            grads = {name: g.add(params[name], alpha=self.decay) for name, g in grads.items()}
        acting = [t for t in transforms if t.acts_on_gradient()]
        if acting:
            projected, all_params = (
                self.input_projections(transforms),
                {**broadcast["params"], **params},
            )
            remaining = {name: g for name, g in grads.items() if name not in projected}
            for transform in acting:
                remaining = transform.on_gradient(remaining, all_params)
            grads = {name: remaining.get(name, g) for name, g in grads.items()}
        return (
            grads
            if self.train_config.clip is None
            else clip_gradients(grads, self.train_config.clip)
        )

    def input_projections(self, transforms: Transforms) -> dict[str, Tensors]:
        """Return the subspaces that are projected out of layer inputs instead of gradients.

        This is exact if the gradient comes only from the layers' outputs and nothing else acts on
        it, and cheaper if a batch has fewer rows than the weight.
        """
        train, size = self.train, self.train_config.batch_size
        if not transforms or not self.fast or train.loss or train.penalty or self.decay:
            return {}
        acting = [t for t in transforms if t.acts_on_gradient()]
        if len(acting) != 1 or type(acting[0]) is not ProjectOut or not acting[0].broadcast:
            return {}
        return {
            name: subspace
            for name, subspace in acting[0].subspaces.items()
            if name in self.trainable and self.params[name].dim() == 2
            and len(self.params[name]) > size
        }  # fmt: skip

    def changes_raw_gradient(self, transforms: Transforms) -> bool:
        """Return whether `decay_transform_clip` does anything."""
        acts = any(transform.acts_on_gradient() for transform in transforms)
        return bool(acts or self.decay or self.train_config.clip is not None)

    def step_transforms(self, transforms: Transforms) -> list[int]:
        """Return the positions of the transforms that act on parameters after a step."""
        sums = self.train_config.optimizer.sums_gradients
        return [i for i, transform in enumerate(transforms) if transform.acts_on_step(sums)]

    # ---- after the steps

    def make_upload(self, client: Client | list[Client], local: LocalUpdate) -> tuple[Upload, Any]:
        """Return the fields that are sent, those of FedAvg among them, and the new state."""
        kind = Each if self.train.per_client_updates else Sum
        fields: dict[str, Sum | Each] = {"update": kind(local.update)}
        if local.buffers:
            fields["buffers"] = Sum(local.buffers)
        if self.train.make_upload is None:
            return fields, None
        result = self.train.make_upload(client, local)
        if not isinstance(result, ClientResult):
            refuse("make_upload", type_name(result), "a ClientResult")
        fields |= dict(result.fields)
        self._check_fields(fields, stacked=isinstance(client, list))
        return fields, result.state

    def _check_fields(self, fields: Upload, stacked: bool) -> None:
        allowed = (*self.per_client_fields, *(("update",) if self.train.per_client_updates else ()))
        check_fields("make_upload", fields, allowed)
        shapes = {name: self.context.parameters[name] for name in self.sent}
        update = fields["update"].value if "update" in fields else {}
        single = {name: value[0] if stacked else value for name, value in update.items()}
        check_tensors("make_upload: 'update'", single, shapes)


def check_fields(where: str, fields: Upload, per_client_fields: tuple[str, ...]) -> None:
    """Refuse fields that are neither Sum nor Each, and an Each that is not announced."""
    for name, field in fields.items():
        if not isinstance(field, Sum | Each):
            refuse(f"{where}: {name!r}", type_name(field), "a Sum or an Each")
        if isinstance(field, Each) and name not in per_client_fields:
            remedy = "Train(per_client_updates=True)" if name == "update" else (
                "Needs.per_client_fields")  # fmt: skip
            refuse(f"{where}: {name!r}", "an Each", f"a Sum, or announced by {remedy}")


def clip_gradients(grads: Tensors, limit: float) -> Tensors:
    """Return the gradients, scaled down if their total norm exceeds `limit`."""
    squares = torch.stack([g.square().sum() for g in grads.values()])
    factor = (limit / (squares.sum().sqrt() + 1e-6)).clamp(max=1.0)
    return {name: g * factor for name, g in grads.items()}


# ---- The batches of a client's local steps, and the seed of their random numbers


@dataclass(frozen=True)
class BatchSchedule:
    """The batches of a client's local steps, as row numbers of the task's training set."""

    rows: Tensor
    """int64 [steps, batch]: an incomplete batch is padded with one of the client's rows."""
    sizes: list[int]
    """Number of rows of each batch that are not padding."""
    epochs: Tensor
    """int64 [steps]: the epoch of each step, from 0."""

    def __iter__(self) -> Iterator[Tensor]:
        for rows, size in zip(self.rows, self.sizes, strict=True):
            yield rows if size == len(rows) else rows[:size]


def batch_schedule(client: Client, config: TrainConfig) -> BatchSchedule:
    """Return a client's batches of one round: its rows, shuffled in every epoch."""
    generator, index, size = client.draw("batches"), client.data.index, config.batch_size
    steps, last_size = -(-len(index) // size), len(index) % size or size
    epochs = config.local_epochs
    if config.max_steps is not None:
        epochs = min(epochs, -(-config.max_steps // steps))
    rows = index[:1].expand(epochs, steps * size).clone()
    for epoch in range(epochs):
        order = torch.randperm(len(index), generator=generator)
        rows[epoch, : len(index)] = index[order.to(index.device)]
    sizes = ([size] * (steps - 1) + [last_size]) * epochs
    numbers = torch.arange(epochs, device=index.device).repeat_interleave(steps)
    limit = config.max_steps
    return BatchSchedule(rows.view(epochs * steps, size)[:limit], sizes[:limit], numbers[:limit])


def first_dropout_seed(client: Client) -> int:
    """Return the client's first dropout seed in this round; step s uses seed + s."""
    context = client.context
    return context.rng.key("dropout", context.task, context.round, client.id) >> 1


# ---- Augmented images in local steps: each client draws its random numbers as it would alone


def augmentation_draws(
    training: LocalTraining, client: Client, steps: int, rows: int
) -> Tensor | None:
    """Return the random numbers of a client's images in a round.

    Returns:
        float [steps, rows, draws], uniform in [0, 1). None if images are not changed.

    """
    if training.augmentation is None:
        return None
    shape = (steps, rows, training.augmentation.draws)
    return torch.rand(shape, generator=client.draw("augment"))


def augmented(training: LocalTraining, client: Client, batch: Batch, draws: Tensor | None) -> Batch:
    """Return a client's batch with changed images; `draws` is [at least rows, draws] or None."""
    if draws is None or training.augmentation is None:
        return batch
    black = client.data.examples.black
    return replace(batch, x=training.augmentation.apply(batch.x, draws[: len(batch.y)], black))
