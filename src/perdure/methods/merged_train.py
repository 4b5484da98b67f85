"""The Train of a combination of methods, and each method's view of server, client and step."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from perdure.contract.context import Client, Context, Server
from perdure.contract.exchanges import Prepared, Train, is_stacked, stacked
from perdure.contract.step import LossTerm, Rows, Step
from perdure.contract.uploads import (
    Change,
    ClientResult,
    CollectedUploads,
    Each,
    Field,
    LocalUpdate,
    Sum,
)
from perdure.core.errors import UserError
from perdure.core.trees import Tensors

SHARED_FIELDS = ("update", "buffers")
"""Upload fields that all parts share: the model's."""


def state_field(name: str) -> str:
    """Return the name of a part's field in the state of a combination."""
    return re.sub(r"\W", "_", name)


def combined_field(part: str, name: str) -> str:
    """Return the name of a part's upload field in a combination; shared fields keep theirs."""
    return name if name in SHARED_FIELDS else f"{part}.{name}"


def refuse_two_owners(function: str, names: list[str]) -> None:
    """Refuse several parts (`names`) that define a function or fact that only one may define."""
    if len(names) > 1:
        owners = " and ".join(repr(name) for name in names)
        raise UserError(
            f"method.with: must be methods of which one at most has its own {function}, "
            f"got {owners}"
        )


# ---- the view of one part


def part_server(server: Server, name: str) -> Server:
    """Return the server as one part sees it."""
    return replace(server, state=getattr(server.state, state_field(name)))


def part_client(client: Client, name: str) -> Client:
    """Return a client as one part sees it."""
    state = getattr(client.state, state_field(name))
    return replace(client, state=state, broadcast=_broadcast_of(client.broadcast, name))


def part_step(step: Step, name: str) -> Step:
    """Return a step as one part sees it."""
    extra = step.extra_by_method.get(name, slice(0, 0))
    tensors = _fields_of(step.tensors, name)
    return replace(
        step, broadcast=_broadcast_of(step.broadcast, name), tensors=tensors, extra=extra
    )


def part_uploads(uploads: CollectedUploads, name: str) -> CollectedUploads:
    """Return the collected uploads as one part sees them: its fields and the common ones."""

    def visible(fields: Mapping[str, Any]) -> dict[str, Any]:
        return {key: fields[key] for key in SHARED_FIELDS if key in fields} | _fields_of(
            fields, name
        )

    sums, weights = visible(uploads.sums), visible(uploads.weights)
    per_client, noise = visible(uploads.per_client), visible(uploads.noise)
    return replace(uploads, sums=sums, weights=weights, per_client=per_client, noise=noise)


def _broadcast_of(broadcast: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {"params": broadcast["params"], **_fields_of(broadcast, name)}


def _fields_of(tree: Mapping[str, Any], name: str) -> dict[str, Any]:
    prefix = f"{name}."
    return {key[len(prefix) :]: v for key, v in tree.items() if key.startswith(prefix)}


# ---- functions of a step; they are equal if their parts are, so that traces can be reused


@dataclass(frozen=True)
class _ExtraRows:
    parts: tuple[tuple[str, Callable[[Step], Any]], ...]

    def __call__(self, step: Step) -> dict[str, Rows]:
        return {name: function(part_step(step, name)) for name, function in self.parts}


@dataclass(frozen=True)
class _Loss:
    name: str
    function: Callable[[Step], LossTerm]

    def __call__(self, step: Step) -> LossTerm:
        return self.function(part_step(step, self.name))


@dataclass(frozen=True)
class _Penalty:
    parts: tuple[tuple[str, Callable[[Step], Any]], ...]

    def __call__(self, step: Step) -> list[LossTerm]:
        terms: list[LossTerm] = []
        for name, function in self.parts:
            term = function(part_step(step, name))
            terms += term if isinstance(term, list) else [term]
        return terms


# ---- the combination


@dataclass(frozen=True)
class MergedTrain:
    """The Trains of several parts, by name."""

    parts: tuple[tuple[str, Train], ...]

    def train(self) -> Train:
        """Return one Train that does what all parts do."""
        loss, combine = self._single("loss"), self._single("combine")
        rounds, buffer = self._single("rounds"), self._single("buffer_size")
        rows, penalty = self._defined("extra_rows"), self._defined("penalty")
        staleness = dict(self.parts)[buffer[0]].staleness_weight if buffer else None
        return Train(
            broadcast=self.broadcast if self._defined("broadcast") else None,
            prepare=self.prepare if self._defined("prepare") else None,
            extra_rows=_ExtraRows(tuple(rows)) if rows else None,
            loss=_Loss(*loss) if loss else None,
            penalty=_Penalty(tuple(penalty)) if penalty else None,
            make_upload=self._make_upload(),
            combine=self.combine if combine else None,
            adjust=self.adjust if self._defined("adjust") else None,
            rounds=rounds[1] if rounds else None,
            trainable=self._trainable(),
            private=tuple(name for _, train in self.parts for name in train.private),
            batch_statistics=all(train.batch_statistics for _, train in self.parts),
            per_client_updates=any(train.per_client_updates for _, train in self.parts),
            buffer_size=buffer[1] if buffer else None,
            clip_norms={
                combined_field(name, field): norm
                for name, train in self.parts
                for field, norm in train.clip_norms.items()
            },
            **({"staleness_weight": staleness} if staleness else {}),
        )

    def _defined(self, field: str) -> list[tuple[str, Any]]:
        """Return the parts that set a field of Train, with its value."""
        values = [(name, getattr(train, field)) for name, train in self.parts]
        return [(name, value) for name, value in values if value is not None]

    def _single(self, field: str) -> tuple[str, Any] | None:
        """Return the one part that sets a field, with its value; refuse several."""
        defined = self._defined(field)
        refuse_two_owners(field, [name for name, _ in defined])
        return defined[0] if defined else None

    def _trainable(self) -> tuple[str, ...] | None:
        by_part = [names for _, names in self._defined("trainable")]
        if not by_part:
            return None
        return tuple(n for n in by_part[0] if all(n in names for names in by_part))

    def broadcast(self, server: Server, context: Context) -> dict[str, Any]:
        """Return all parts' fields, each under its part's name."""
        return {
            f"{name}.{key}": value
            for name, function in self._defined("broadcast")
            for key, value in function(part_server(server, name), context).items()
        }

    def prepare(self, client: Client) -> Prepared:
        """Return all parts' tensors and transforms; those of the first part are applied last."""
        initial: Tensors = {}
        tensors: Tensors = {}
        transforms: list[Any] = []
        for name, function in reversed(self._defined("prepare")):
            local = function(part_client(client, name))
            twice = sorted(set(initial) & set(local.initial_params))
            if twice:
                raise UserError(
                    f"method.with: must be methods of which one at most sets the initial value of "
                    f"{twice[0]!r}, got two"
                )
            initial |= local.initial_params
            tensors |= {f"{name}.{key}": value for key, value in local.tensors.items()}
            transforms += local.transforms
        return Prepared(initial, tensors, tuple(transforms))

    def combine(self, server: Server, uploads: CollectedUploads, context: Context) -> Tensors:
        """Return the update of the one part that combines."""
        ((name, function),) = self._defined("combine")
        update: Tensors = function(part_server(server, name), part_uploads(uploads, name), context)
        return update

    def adjust(
        self, server: Server, change: Change, uploads: CollectedUploads, context: Context
    ) -> Change:
        """Return the change after the `adjust` of all parts, in their order."""
        for name, function in self._defined("adjust"):
            field = state_field(name)
            visible = replace(change, state=getattr(change.state, field))
            uploaded = part_uploads(uploads, name)
            after = function(part_server(server, name), visible, uploaded, context)
            change = replace(after, state=replace(change.state, **{field: after.state}))
        return change

    def _make_upload(self) -> Callable[..., ClientResult] | None:
        functions = [function for _, function in self._defined("make_upload")]
        if not functions:
            return None
        return self.stacked_upload if all(map(is_stacked, functions)) else self.upload

    def upload(self, client: Client, local: LocalUpdate) -> ClientResult:
        """Return the fields of all parts; each part sees the update of the part before it."""
        fields: dict[str, Field] = {}
        state = client.state
        for name, function in self._defined("make_upload"):
            call = _call_stacked if is_stacked(function) else _call
            result = call(function, part_client(client, name), local)
            local, fields = self._add_fields(name, result, local, fields)
            if result.state is not None:
                state = replace(state, **{state_field(name): result.state})
        return ClientResult(fields, None if state is client.state else state)

    @stacked
    def stacked_upload(self, clients: list[Client], local: LocalUpdate) -> ClientResult:
        """Return the same as `upload` for a stack of clients."""
        fields: dict[str, Field] = {}
        states = [client.state for client in clients]
        changed = False
        for name, function in self._defined("make_upload"):
            result = function([part_client(client, name) for client in clients], local)
            local, fields = self._add_fields(name, result, local, fields)
            if result.state is not None:
                changed, pairs = True, zip(states, result.state, strict=True)
                states = [replace(state, **{state_field(name): new}) for state, new in pairs]
        return ClientResult(fields, states if changed else None)

    def _add_fields(
        self, name: str, result: ClientResult, local: LocalUpdate, fields: dict[str, Field]
    ) -> tuple[LocalUpdate, dict[str, Field]]:
        """Return the update and the fields, with those of one part added."""
        new = {combined_field(name, f): v for f, v in result.fields.items()}
        if "update" in new:
            update = dict(new["update"].value)
            local, new["update"] = replace(local, update=update), self._update_field(new, fields)
        if "buffers" in new:
            local = replace(local, buffers=dict(new["buffers"].value))
        return local, fields | new

    def _update_field(self, new: Mapping[str, Field], before: Mapping[str, Field]) -> Field:
        """Return the newest update: an Each if a part must see it, else a Sum."""
        field = new["update"]
        if any(train.per_client_updates for _, train in self.parts):
            return Each(field.value)
        earlier, weight = before.get("update"), getattr(field, "weight", None)
        if weight is None and isinstance(earlier, Sum):
            weight = earlier.weight
        return Sum(field.value, weight)


def _call(function: Callable[..., Any], client: Client, local: LocalUpdate) -> ClientResult:
    result: ClientResult = function(client, local)
    return result


def _call_stacked(function: Callable[..., Any], client: Client, local: LocalUpdate) -> ClientResult:
    """Call a stacked function for one client."""
    result = function([client], local.as_stack())
    fields = {
        name: replace(part, value={key: value[0] for key, value in part.value.items()})
        for name, part in result.fields.items()
    }
    return ClientResult(fields, result.state and result.state[0])
