"""One Train out of the Trains of several methods, and what each part sees of the whole."""

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
"""Fields of an upload that belong to all parts."""


def state_field(name: str) -> str:
    """Return the name of a part's field in the states of a combination."""
    return re.sub(r"\W", "_", name)


def combined_field(part: str, name: str) -> str:
    """Return the name of a part's upload field in a combination; the model's are common to all."""
    return name if name in SHARED_FIELDS else f"{part}.{name}"


def refuse_two_owners(what: str, names: list[str]) -> None:
    """Refuse two parts that each have something of which there is one."""
    if len(names) > 1:
        both = " and ".join(repr(name) for name in names)
        raise UserError(f"method.with: {both} each have their own {what}, allowed: one of them")


# ---- what a part sees


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

    def own(fields: Mapping[str, Any]) -> dict[str, Any]:
        return {key: fields[key] for key in SHARED_FIELDS if key in fields} | _fields_of(
            fields, name
        )

    sums, weights, each = own(uploads.sums), own(uploads.weights), own(uploads.per_client)
    return replace(uploads, sums=sums, weights=weights, per_client=each)


def _broadcast_of(broadcast: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {"params": broadcast["params"], **_fields_of(broadcast, name)}


def _fields_of(tree: Mapping[str, Any], name: str) -> dict[str, Any]:
    prefix = f"{name}."
    return {key[len(prefix) :]: v for key, v in tree.items() if key.startswith(prefix)}


# ---- functions of a step, equal if their parts are: then a trace serves in later tasks


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


# ---- the whole


@dataclass(frozen=True)
class MergedTrain:
    """The Trains of several parts, by name."""

    parts: tuple[tuple[str, Train], ...]

    def train(self) -> Train:
        """Return them as one."""
        loss, combine = self._one("loss"), self._one("combine")
        rounds, buffer = self._one("rounds"), self._one("buffer_size")
        rows, penalty = self._having("extra_rows"), self._having("penalty")
        staleness = dict(self.parts)[buffer[0]].staleness_weight if buffer else None
        return Train(
            broadcast=self.broadcast if self._having("broadcast") else None,
            prepare=self.prepare if self._having("prepare") else None,
            extra_rows=_ExtraRows(tuple(rows)) if rows else None,
            loss=_Loss(*loss) if loss else None,
            penalty=_Penalty(tuple(penalty)) if penalty else None,
            make_upload=self._make_upload(),
            combine=self.combine if combine else None,
            adjust=self.adjust if self._having("adjust") else None,
            rounds=rounds[1] if rounds else None,
            trainable=self._trainable(),
            private=tuple(name for _, train in self.parts for name in train.private),
            batch_statistics=all(train.batch_statistics for _, train in self.parts),
            per_client_updates=any(train.per_client_updates for _, train in self.parts),
            buffer_size=buffer[1] if buffer else None,
            **({"staleness_weight": staleness} if staleness else {}),
        )

    def _having(self, what: str) -> list[tuple[str, Any]]:
        each = [(name, getattr(train, what)) for name, train in self.parts]
        return [(name, value) for name, value in each if value is not None]

    def _one(self, what: str) -> tuple[str, Any] | None:
        having = self._having(what)
        refuse_two_owners(what, [name for name, _ in having])
        return having[0] if having else None

    def _trainable(self) -> tuple[str, ...] | None:
        each = [names for _, names in self._having("trainable")]
        return tuple(n for n in each[0] if all(n in names for names in each)) if each else None

    def broadcast(self, server: Server, context: Context) -> dict[str, Any]:
        """Return all parts' fields, each under its part's name."""
        return {
            f"{name}.{key}": value
            for name, function in self._having("broadcast")
            for key, value in function(part_server(server, name), context).items()
        }

    def prepare(self, client: Client) -> Prepared:
        """Return all parts' tensors and transforms: the first one named has the last word."""
        initial: Tensors = {}
        tensors: Tensors = {}
        transforms: list[Any] = []
        for name, function in reversed(self._having("prepare")):
            local = function(part_client(client, name))
            twice = sorted(set(initial) & set(local.initial_params))
            if twice:
                raise UserError(f"method.with: two parts give {twice[0]!r} an initial value")
            initial |= local.initial_params
            tensors |= {f"{name}.{key}": value for key, value in local.tensors.items()}
            transforms += local.transforms
        return Prepared(initial, tensors, tuple(transforms))

    def combine(self, server: Server, uploads: CollectedUploads, context: Context) -> Tensors:
        """Return the update of the one part that combines."""
        ((name, function),) = self._having("combine")
        update: Tensors = function(part_server(server, name), part_uploads(uploads, name), context)
        return update

    def adjust(
        self, server: Server, change: Change, uploads: CollectedUploads, context: Context
    ) -> Change:
        """Return the change after one part after the other."""
        for name, function in self._having("adjust"):
            at, own = state_field(name), getattr(change.state, state_field(name))
            seen = replace(change, state=own)
            after = function(part_server(server, name), seen, part_uploads(uploads, name), context)
            change = replace(after, state=replace(change.state, **{at: after.state}))
        return change

    def _make_upload(self) -> Callable[..., ClientResult] | None:
        functions = [function for _, function in self._having("make_upload")]
        if not functions:
            return None
        return self.stacked_upload if all(map(is_stacked, functions)) else self.upload

    def upload(self, client: Client, local: LocalUpdate) -> ClientResult:
        """Return what one part after the other sends; each sees the update as it is by then."""
        fields: dict[str, Field] = {}
        state = client.state
        for name, function in self._having("make_upload"):
            own = part_client(client, name)
            result = _one(function, own, local) if is_stacked(function) else function(own, local)
            local, fields = self._added(name, result, local, fields)
            if result.state is not None:
                state = replace(state, **{state_field(name): result.state})
        return ClientResult(fields, None if state is client.state else state)

    @stacked
    def stacked_upload(self, clients: list[Client], local: LocalUpdate) -> ClientResult:
        """Do the same for a stack of clients."""
        fields: dict[str, Field] = {}
        states = [client.state for client in clients]
        changed = False
        for name, function in self._having("make_upload"):
            result = function([part_client(client, name) for client in clients], local)
            local, fields = self._added(name, result, local, fields)
            if result.state is not None:
                changed, pairs = True, zip(states, result.state, strict=True)
                states = [replace(state, **{state_field(name): own}) for state, own in pairs]
        return ClientResult(fields, states if changed else None)

    def _added(
        self, name: str, result: ClientResult, local: LocalUpdate, fields: dict[str, Field]
    ) -> tuple[LocalUpdate, dict[str, Field]]:
        """Return the update and the fields with those of one part."""
        new = {combined_field(name, f): v for f, v in result.fields.items()}
        if "update" in new:
            update = dict(new["update"].value)
            local, new["update"] = replace(local, update=update), self._update(new, fields)
        if "buffers" in new:
            local = replace(local, buffers=dict(new["buffers"].value))
        return local, fields | new

    def _update(self, new: Mapping[str, Field], before: Mapping[str, Field]) -> Field:
        """Return the newest update: an Each if any part must see it, with a weight that was set."""
        field = new["update"]
        if any(train.per_client_updates for _, train in self.parts):
            return Each(field.value)
        earlier, weight = before.get("update"), getattr(field, "weight", None)
        if weight is None and isinstance(earlier, Sum):
            weight = earlier.weight
        return Sum(field.value, weight)


def _one(function: Callable[..., Any], client: Client, local: LocalUpdate) -> ClientResult:
    """Call a stacked function for one client."""
    result = function([client], local.as_stack())
    fields = {
        name: replace(part, value={key: value[0] for key, value in part.value.items()})
        for name, part in result.fields.items()
    }
    return ClientResult(fields, result.state and result.state[0])
