"""Methods put together by name: the parts of a config such as

    method: {kind: fedprotip, threshold: 0.95, with: [{kind: special, lambda: 0.1}, {kind: fedomg}]}

Each part keeps server memory, client state, broadcast fields and tensors of its own, under its
name, and sees nothing of the others' but the model and the update. What the hooks do together:

    trainable            what all parts train
    loss, combine, predict, route, and choices such as the head
                         of the one part that has it; two are refused by name
    penalty              added up
    gradient, settle     from the last part named to the first, so that the first has the last word:
                         a projection named first projects what the others added
    finish               from the first to the last, each getting the update that the one before
                         sent; if any part must see every client's update, it is an Each
    adjust               from the first to the last: an anchor named last holds what is applied
    begin_task, absorb   one after the other; the extra round is held if any part asks for it
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

from torch import Tensor

from perdure.errors import UserError
from perdure.federation.messages import Each, Field, Report, Sum, Upload
from perdure.methods.base import Batch, Client, Finish, Method, Net, Place, Server
from perdure.models.network import Network
from perdure.trees import Tensors, Tree

SHARED = ("update", "buffers")
"""Fields of an upload that belong to all parts."""
SINGLE = ("loss", "combine", "predict", "route")
"""Functions that at most one part may have."""
CHOICES = ("loss_outputs", "preferred_weighting")
"""Choices in which the parts that make one must agree."""
CLOSED = ("aggregate",)
"""Functions whose owner cannot be combined: they replace the chain itself."""


@dataclass(frozen=True)
class Combined(Method):
    """Several methods as one: first the one that a config names, then those of its `with`."""

    parts: tuple[tuple[str, Method], ...] = ()

    def __post_init__(self) -> None:
        names = [name for name, _ in self.parts]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise UserError(f"method.with: got {twice!r} twice, allowed: each method once")
        for function in SINGLE:
            _refuse_two(function, self._names(function))
        for function in CHOICES:
            if len({getattr(part, function)() for _, part in self._owners(function)}) > 1:
                _refuse_two(function, self._names(function))
        _refuse_beside_prompts(self.parts)
        for function in CLOSED:
            for owner in self._names(function):
                raise UserError(
                    f"method.with: {owner!r} aggregates in its own way, so it stands alone"
                )

    def has_own(self, name: str) -> bool:
        """Whether any part has a function of its own of this name."""
        if name == "finish_all":  # parts pass the update on from one to the next, client by client
            return False
        return any(part.has_own(name) for _, part in self.parts)

    def _names(self, function: str) -> list[str]:
        return [name for name, part in self.parts if part.has_own(function)]

    def _owners(self, function: str) -> list[tuple[str, Method]]:
        return [(name, part) for name, part in self.parts if part.has_own(function)]

    def _owner(self, function: str) -> tuple[str, Method]:
        return next(iter(self._owners(function)), ("", Method()))

    # ---- before training

    def refuse(self, config: Any) -> str | None:
        """The first part's reason that has one."""
        return next(filter(None, (part.refuse(config) for _, part in self.parts)), None)

    def preferred_head(self, stream: str) -> str:
        """A growing head if any part wants one."""
        wants = {part.preferred_head(stream) for _, part in self.parts}
        return "growing" if "growing" in wants else "shared"

    def loss_outputs(self) -> str:
        """The choice of the part that makes one."""
        return self._owner("loss_outputs")[1].loss_outputs()

    def preferred_weighting(self) -> str:
        """The choice of the part that makes one."""
        return self._owner("preferred_weighting")[1].preferred_weighting()

    def heaviest(self, rows: int, weighting: str) -> int:
        """The heaviest of all parts'."""
        return max(part.heaviest(rows, weighting) for _, part in self.parts)

    def shown_fields(self) -> tuple[str, ...]:
        """All parts' fields, by the names that they have in an upload."""
        found = [(name, field) for name, part in self.parts for field in part.shown_fields()]
        return tuple(field if field in SHARED else f"{name}.{field}" for name, field in found)

    def adapt(self, network: Network) -> Network:
        """One part after the other."""
        for _, part in self.parts:
            network = part.adapt(network)
        return network

    # ---- server

    def start(self, params: Tensors, place: Place) -> Tree:
        """A memory for each part."""
        return {name: part.start(params, place) for name, part in self.parts}

    def begin_task(self, server: Server, place: Place) -> Server:
        """One part after the other; whoever made the network first, so that all see it ready."""
        for name, part in sorted(self.parts, key=lambda each: not each[1].has_own("adapt")):
            server = _whole(server, name, part.begin_task(_its(server, name), place))
        return server

    def broadcast(self, server: Server, place: Place) -> Tree:
        """All parts' fields."""
        return _joined({name: p.broadcast(_its(server, name), place) for name, p in self.parts})

    def broadcast_lasting(self, server: Server, place: Place) -> Tree:
        """All parts' fields."""
        return _joined(
            {name: p.broadcast_lasting(_its(server, name), place) for name, p in self.parts}
        )

    def combine(self, report: Report, server: Server, place: Place) -> Tensors:
        """The one part's that has it, else the mean."""
        name, part = self._owner("combine")
        return part.combine(_report(report, name), _its(server, name), place)

    def adjust(self, update: Tensors, server: Server, place: Place) -> tuple[Tensors, Tree]:
        """One part after the other."""
        memory = dict(server.memory)
        for name, part in self._owners("adjust"):
            update, memory[name] = part.adjust(update, _its(server, name), place)
        return update, memory

    def adjust_buffers(self, change: Tensors, server: Server, place: Place) -> Tensors:
        """One part after the other."""
        for name, part in self._owners("adjust_buffers"):
            change = part.adjust_buffers(change, _its(server, name), place)
        return change

    def consolidates(self, place: Place) -> int:
        """As many extra rounds as the part asks for that asks for most."""
        return max(int(part.consolidates(place)) for _, part in self.parts)

    def consolidates_alone(self) -> bool:
        """If all parts that have something to extract do it alone."""
        return all(part.consolidates_alone() for _, part in self._owners("extract"))

    def _at_work(self, place: Place) -> list[tuple[str, Method]]:
        """The parts that asked for this extra round."""
        return [(name, part) for name, part in self.parts if part.consolidates(place) > place.extra]

    def absorb(self, server: Server, report: Report, place: Place) -> Server:
        """One after the other, those that asked for the extra round."""
        for name, part in self._at_work(place):
            after = part.absorb(_its(server, name), _report(report, name), place)
            server = _whole(server, name, after)
        return server

    def diagnose(self, server: Server, place: Place) -> Tree:
        """Each part's numbers under its name."""
        found = {name: part.diagnose(_its(server, name), place) for name, part in self.parts}
        return {name: numbers for name, numbers in found.items() if numbers}

    # ---- client

    def trainable(self, params: Tensors, place: Place) -> tuple[str, ...]:
        """What all parts train."""
        each = [part.trainable(params, place) for _, part in self.parts]
        return tuple(name for name in each[0] if all(name in names for names in each[1:]))

    def batch_statistics(self, place: Place) -> bool:
        """Unless a part forbids it."""
        return all(part.batch_statistics(place) for _, part in self.parts)

    def starting(self, client: Client) -> Tensors:
        """Of the parts that have something to say; the first one named has the last word."""
        found: Tensors = {}
        for name, part in reversed(self._owners("starting")):
            found |= part.starting(_client(client, name))
        return found

    def derive(self, received: Tree) -> Tree:
        """All parts' fields."""
        return _joined({name: part.derive(_received(received, name)) for name, part in self.parts})

    def guards(self, received: Tree) -> dict[str, Tensors]:
        """None: a projection has the last word on what the other parts add to the gradient."""
        return {}

    def prepare(self, client: Client) -> Tensors:
        """All parts' tensors."""
        return _joined({name: part.prepare(_client(client, name)) for name, part in self.parts})

    def loss(self, net: Net, params: Tensors, batch: Batch, received: Tree, own: Tensors) -> Tensor:
        """The one part's that has it, else the cross-entropy."""
        name, part = self._owner("loss")
        return part.loss(net, params, batch, _received(received, name), _part_of(own, name))

    def penalty(
        self, net: Net, params: Tensors, batch: Batch, received: Tree, own: Tensors
    ) -> Tensor:
        """The sum of the parts'."""
        terms = [
            part.penalty(net, params, batch, _received(received, name), _part_of(own, name))
            for name, part in self._owners("penalty")
        ]
        return reduce(Tensor.__add__, terms)

    def gradient(self, grads: Tensors, params: Tensors, received: Tree, own: Tensors) -> Tensors:
        """From the last part to the first."""
        for name, part in reversed(self._owners("gradient")):
            grads = part.gradient(grads, params, _received(received, name), _part_of(own, name))
        return grads

    def settle(
        self, params: Tensors, before: Tensors, received: Tree, own: Tensors, lr: float
    ) -> Tensors:
        """From the last part to the first."""
        for name, part in reversed(self._owners("settle")):
            mine = (_received(received, name), _part_of(own, name))
            params = params | part.settle(params, before, *mine, lr)
        return params

    def settles(self, optimizer: str) -> bool:
        """If any part does."""
        return any(part.settles(optimizer) for _, part in self.parts)

    def finish(self, client: Client, update: Tensors, buffers: Tensors) -> Finish:
        """One part after the other; each gets the update that the one before would send."""
        done = Method.finish(self, client, update, buffers)
        upload, kept = dict(done.upload), dict(client.kept)
        for name, part in self._owners("finish"):
            change = upload["buffers"].value if "buffers" in upload else buffers
            done = part.finish(_client(client, name), upload["update"].value, change)
            upload |= _named(done.upload, name, upload)
            kept |= {} if done.kept is None else {name: done.kept}
        return Finish(upload, kept or None)

    def extract(self, client: Client) -> Finish:
        """What all parts that asked for the extra round send and keep."""
        upload: dict[str, Field] = {}
        kept = dict(client.kept)
        for name, part in self._at_work(client.place):
            done = part.extract(_client(client, name))
            upload |= {f"{name}.{field}": value for field, value in done.upload.items()}
            kept |= {} if done.kept is None else {name: done.kept}
        return Finish(upload, kept or None)

    # ---- inference

    def export(self, server: Server) -> Tree:
        """Each part's under its name."""
        return {name: part.export(_its(server, name)) for name, part in self.parts}

    def predict(self, server: Server, x: Tensor, network: Network) -> Tensor:
        """The one part's that has it, else the global model's."""
        name, part = self._owner("predict")
        return part.predict(_its(server, name), x, network)

    def route(self, server: Server, x: Tensor, network: Network) -> Tensor | None:
        """The one part's that can."""
        name, part = self._owner("route")
        return part.route(_its(server, name), x, network)


def _refuse_two(function: str, names: list[str]) -> None:
    if len(names) > 1:
        both = " and ".join(repr(name) for name in names)
        raise UserError(f"method.with: {both} each have their own {function}, allowed: one of them")


def _refuse_beside_prompts(parts: tuple[tuple[str, Method], ...]) -> None:
    prompting = [name for name, part in parts if part.has_own("adapt")]
    for name, part in parts:
        if prompting and not part.beside_prompts:
            raise UserError(
                f"method.with: {name!r} needs layers that are trained, which {prompting[0]!r} "
                "freezes, allowed: one of them"
            )


def _its(server: Server, name: str) -> Server:
    """The server as one part sees it."""
    return replace(server, memory=server.memory.get(name, {}))


def _whole(server: Server, name: str, after: Server) -> Server:
    """The server after one part changed it."""
    return replace(after, memory=server.memory | {name: after.memory})


def _client(client: Client, name: str) -> Client:
    """A client as one part sees it."""
    kept = client.kept.get(name, {})
    return replace(client, kept=kept, received=_received(client.received, name))


def _received(received: Tree, name: str) -> Tree:
    """The model and what one part broadcast."""
    return {"params": received["params"], **_part_of(received, name)}


def _joined(trees: dict[str, Tree]) -> Tree:
    """Fields of all parts: each under its part's name and a dot."""
    return {f"{name}.{key}": value for name, tree in trees.items() for key, value in tree.items()}


def _part_of(tree: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The fields of one part."""
    start = f"{name}."
    return {key[len(start) :]: v for key, v in tree.items() if key.startswith(start)}


def _report(report: Report, name: str) -> Report:
    """What one part may see of a round: its own fields and the shared ones."""

    def mine(fields: dict[str, Any]) -> dict[str, Any]:
        shared = {key: value for key, value in fields.items() if key in SHARED}
        return shared | _part_of(fields, name)

    return Report(mine(report.totals), mine(report.weights), mine(report.each), report.shares)


def _named(upload: Upload, name: str, before: Upload) -> dict[str, Field]:
    """One part's upload among the others': shared fields keep their name and the stricter type."""
    return {
        field if field in SHARED else f"{name}.{field}": _stricter(value, before.get(field))
        if field in SHARED
        else value
        for field, value in upload.items()
    }


def _stricter(new: Field, old: Field | None) -> Field:
    """The newer value; an Each stays one, and a weight that a part asked for stays too."""
    if isinstance(new, Each) or old is None:
        return new
    if isinstance(old, Each):
        return Each(new.value)
    return Sum(new.value, old.weight if new.weight is None else new.weight)
