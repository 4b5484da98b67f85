"""One client's local training, as both engines do it: which batches, which loss, which gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from perdure.algebra import subspaces
from perdure.config import TrainConfig
from perdure.contract.checks import check_tensors, refuse
from perdure.contract.context import Client, Context
from perdure.contract.exchanges import Prepared, Train, sent_names, trained_names
from perdure.contract.step import Batch, Step, join_rows, mean_cross_entropy, mean_term
from perdure.contract.transforms import ProjectOut, Transform
from perdure.contract.uploads import ClientResult, Each, LocalUpdate, Sum, Upload
from perdure.core.trees import Tensors, Tree
from perdure.models.forward_pass import ForwardPass

Transforms = tuple[Transform, ...]
Keep = Callable[[int, Any, Tensors], None]
"""Stores a client's new state (None: it does not change) and its private parameters."""
_NOTHING = Prepared()


@dataclass(frozen=True)
class LocalTraining:
    """What all clients of a training round have in common."""

    train: Train
    context: Context
    config: TrainConfig
    params: Tensors
    buffers: Tensors
    broadcast: Tree
    """The fields that the server sent, and the global model as `params`."""
    per_client_fields: tuple[str, ...] = ()
    fast: bool = True
    """Whether projections may be done on layer inputs (off: for measurements)."""

    @cached_property
    def trainable(self) -> tuple[str, ...]:
        """Names of the parameters that are trained."""
        return trained_names(self.train, self.context)

    @cached_property
    def sent(self) -> tuple[str, ...]:
        """Names of the trained parameters that travel."""
        return sent_names(self.train, self.context)

    @property
    def private(self) -> tuple[str, ...]:
        """Names of the trained parameters that never leave a client."""
        return self.train.private

    # ---- before the steps

    def prepared(self, client: Client) -> Prepared:
        """Return a client's own part of the round, checked."""
        if self.train.prepare is None and not self.private:
            return _NOTHING
        local = _NOTHING if self.train.prepare is None else self.train.prepare(client)
        if not isinstance(local, Prepared):
            refuse("prepare", f"a {type(local).__name__}", "Prepared")
        own = {name: client.params[name] for name in self.private}
        local = replace(local, initial_params=own | local.initial_params)
        self._check(local)
        return replace(local, transforms=tuple(self._cheapest(t) for t in local.transforms))

    def _check(self, local: Prepared) -> None:
        shapes = {name: self.context.parameters[name] for name in self.trainable}
        check_tensors("prepare: initial_params", local.initial_params, shapes)
        for transform in local.transforms:
            transform.check(self.context.parameters)
        forms = {
            "tensors": sorted((n, str(t.dtype), t.dim()) for n, t in local.tensors.items()),
            "transforms": [transform.settings() for transform in local.transforms],
        }
        for part, form in forms.items():
            first = self._forms.setdefault(part, form)
            if form != first:
                refuse(f"prepare: {part}", f"{form} for one client and {first} for another",
                       "the same names and kinds for all clients (a transform without any "
                       "parameter, such as ProjectOut({}), does nothing)")  # fmt: skip

    @cached_property
    def _forms(self) -> dict[str, Any]:
        return {}

    def _cheapest(self, transform: Transform) -> Transform:
        """Return a projection on broadcast subspaces in the form that is cheapest in many steps."""
        if type(transform) is not ProjectOut:
            return transform
        halves = {name: next(iter(s.values())) for name, s in transform.subspaces.items()}
        if not all(id(half) in self._broadcast_ids for half in halves.values()):
            return transform
        for name, half in halves.items():
            if id(half) not in self._projectors:
                self._projectors[id(half)] = subspaces.projector(transform.subspaces[name])
        projectors = {name: self._projectors[id(half)] for name, half in halves.items()}
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
        """Return the loss of one step and the new running statistics.

        Args:
            params: The parameters in training.
            buffers: Running statistics.
            batch: The client's rows.
            key: int64 scalar from which the step's noise is hashed.
            broadcast: The fields that the server sent, and the global model as `params`.
            local: The client's `tensors` and `transforms`.
            stacked: Whether the step runs under vmap.
        """
        train, network = (
            self.train,
            self.context.network.with_cached_features(batch.cached_features),
        )
        fwd = ForwardPass(
            train=True,
            buffers=buffers,
            batch_statistics=train.batch_statistics,
            key=key,
            mask=batch.mask,
            stacked=stacked,
            input_projections=self.input_projections(local.transforms),
        )
        full = {**broadcast["params"], **params}
        step = Step(full, batch, broadcast, local.tensors, key, network, fwd)
        if train.extra_rows is not None:
            step = join_rows(step, train.extra_rows(step))
        if train.loss is None:
            total = mean_cross_entropy(step.logits(), step.batch)
        else:
            total = mean_term("loss", train.loss(step), step)
        if train.penalty is not None:
            total = total + mean_term("penalty", train.penalty(step), step)
        return total, step.fwd.updates

    def transform_gradient(
        self, grads: Tensors, params: Tensors, broadcast: Tree, transforms: Transforms
    ) -> Tensors:
        """Return the gradient as the optimizer gets it: weight decay, transforms, clipping."""
        decay = self.config.coupled_decay
        if decay:
            grads = {name: g.add(params[name], alpha=decay) for name, g in grads.items()}
        acting = [t for t in transforms if t.acts_on_gradient()]
        if acting:
            done, full = self.input_projections(transforms), {**broadcast["params"], **params}
            rest = {name: g for name, g in grads.items() if name not in done}
            for transform in acting:
                rest = transform.on_gradient(rest, full)
            grads = {name: rest.get(name, g) for name, g in grads.items()}
        return grads if self.config.clip is None else clipped(grads, self.config.clip)

    def input_projections(self, transforms: Transforms) -> dict[str, Tensors]:
        """Return the projections that are done on layer inputs instead of on gradients.

        That is exact where the gradient comes from the layers' outputs alone and nothing else acts
        on it, and cheaper where a batch has fewer rows than the weight.
        """
        train, size = self.train, self.config.batch_size
        if (
            not transforms
            or not self.fast
            or train.loss
            or train.penalty
            or self.config.coupled_decay
        ):
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

    def changes_gradient(self, transforms: Transforms) -> bool:
        """Return whether `transform_gradient` does anything."""
        acts = any(transform.acts_on_gradient() for transform in transforms)
        return bool(acts or self.config.coupled_decay or self.config.clip is not None)

    def after_step(self, transforms: Transforms) -> list[int]:
        """Return the positions of the transforms that act after the optimizer's step."""
        kind = self.config.optimizer
        return [i for i, transform in enumerate(transforms) if transform.acts_on_step(kind)]

    # ---- after the steps

    def default_fields(self, local: LocalUpdate) -> dict[str, Sum | Each]:
        """Return what FedAvg sends: the update and, if there are any, running statistics."""
        kind = Each if self.train.per_client_updates else Sum
        fields: dict[str, Sum | Each] = {"update": kind(local.update)}
        return fields | {"buffers": Sum(local.buffers)} if local.buffers else fields

    def upload(self, client: Client | list[Client], local: LocalUpdate) -> tuple[Upload, Any]:
        """Return the fields that are sent and the new state, of one client or of a stack."""
        fields: dict[str, Sum | Each] = self.default_fields(local)
        if self.train.make_upload is None:
            return fields, None
        result = self.train.make_upload(client, local)
        if not isinstance(result, ClientResult):
            refuse("make_upload", f"a {type(result).__name__}", "ClientResult")
        fields |= dict(result.fields)
        self._check_fields(fields, lead=isinstance(client, list))
        return fields, result.state

    def _check_fields(self, fields: Upload, lead: bool) -> None:
        allowed = (*self.per_client_fields, *(("update",) if self.train.per_client_updates else ()))
        check_fields("make_upload", fields, allowed)
        shapes = {name: self.context.parameters[name] for name in self.sent}
        update = fields["update"].value if "update" in fields else {}
        one = {name: value[0] if lead else value for name, value in update.items()}
        check_tensors("make_upload: 'update'", one, shapes)


def check_fields(where: str, fields: Upload, per_client_fields: tuple[str, ...]) -> None:
    """Refuse fields that are neither Sum nor Each, and an Each that is not announced."""
    for name, part in fields.items():
        if not isinstance(part, Sum | Each):
            refuse(f"{where}: {name!r}", f"a {type(part).__name__}", "Sum or Each")
        if isinstance(part, Each) and name not in per_client_fields:
            remedy = "Train(per_client_updates=True)" if name == "update" else (
                "its name in Needs.per_client_fields")  # fmt: skip
            refuse(f"{where}: {name!r}", "an Each that is not announced", f"a Sum, or {remedy}")


def clipped(grads: Tensors, limit: float) -> Tensors:
    """Return the gradients, scaled down to a total norm of at most `limit`."""
    squares = torch.stack([g.square().sum() for g in grads.values()])
    factor = (limit / (squares.sum().sqrt() + 1e-6)).clamp(max=1.0)
    return {name: g * factor for name, g in grads.items()}
