"""Combinations of methods, such as

    method: {kind: fedprotip, threshold: 0.95, with: [{kind: special, lambda: 0.1}, {kind: fedomg}]}

Each part has server state, client state, broadcast fields and tensors under its name, and sees
of the others only the model and the update. The parts' exchanges are combined as follows:

    concatenated      opening exchanges and task-end exchanges (named `part.name`); extra rows;
                      stored examples, which all parts see at a task's end;
                      transforms, last part first, so that the first named has the last word
    added             penalties; every term sees the joined batch
    chained           make_upload (each part sees the update as the one before would send it),
                      adjust
    intersected       trainable, streams
    any               per_client_updates, private, a growing head
    all               batch_statistics
    one owner         loss, combine, rounds, buffer_size, predict, route, wrap_network; where two
                      parts have one, the combination is refused by name
    widest            active_outputs, where parts have a preference: all, else seen, else task
    agreed            weighting, where both parts have a preference; the weights of a part that sets
                      them itself are those of the combination

Beside a part with `wrap_network` (prompts) no other may work on trained layers, nor bring extra
rows, a loss or a penalty, because `step.logits()` is not that part's forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, make_dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any, Literal

from torch import Tensor

from perdure.contract.context import Client, Context, Server
from perdure.contract.exchanges import Exchange, TaskExchanges, Train, split_exchanges
from perdure.contract.method import Diagnosis, Method
from perdure.contract.needs import Needs, Preferences
from perdure.contract.step import Batch
from perdure.core.errors import UserError
from perdure.core.trees import Tree
from perdure.methods.merged_train import (
    MergedTrain,
    combined_field,
    part_client,
    part_server,
    part_uploads,
    refuse_two_owners,
    state_field,
)
from perdure.models.network import Network

# ---- Exchanges of one method as exchanges of a combination, in which it sees its own fields


def part_exchange(name: str, exchange: Exchange) -> Exchange:
    """Return a part's exchange as an exchange of the combination."""
    return replace(
        exchange,
        name=f"{name}.{exchange.name}",
        broadcast=exchange.broadcast and _broadcast(name, exchange.broadcast),
        client_work=exchange.client_work and _client_work(name, exchange.client_work),
        aggregate=exchange.aggregate and _aggregate(name, exchange.aggregate),
        clip_norms={combined_field(name, f): norm for f, norm in exchange.clip_norms.items()},
    )


def _broadcast(name: str, function: Callable[..., Mapping[str, Any]]) -> Callable[..., Any]:
    def broadcast(server: Server, context: Context) -> dict[str, Any]:
        return {f"{name}.{k}": v for k, v in function(part_server(server, name), context).items()}

    return broadcast


def with_stored(
    function: Callable[[Client], Any], stored: Callable[[Client], Iterator[Batch]]
) -> Callable[[Client], Any]:
    """Return a client's work in which it has the stored examples of a combination."""
    return lambda client: function(replace(client, stored_source=lambda: stored(client)))


def _client_work(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def client_work(client: Client) -> Any:
        result = function(part_client(client, name))
        state = result.state
        if state is not None:
            state = replace(client.state, **{state_field(name): state})
        return replace(
            result,
            fields={combined_field(name, f): v for f, v in result.fields.items()},
            state=state,
        )

    return client_work


def _aggregate(name: str, function: Callable[..., Server]) -> Callable[..., Server]:
    def aggregate(server: Server, uploads: Any, context: Context) -> Server:
        after = function(part_server(server, name), part_uploads(uploads, name), context)
        return replace(after, state=replace(server.state, **{state_field(name): after.state}))

    return aggregate


# ---- Combinations of methods, such as

Parts = tuple[tuple[str, Method], ...]
"""Methods with their kinds."""
_WIDEST: tuple[Literal["all", "seen", "task"], ...] = ("all", "seen", "task")
"""Outputs in the loss, the widest first."""


@dataclass(frozen=True)
class Combined(Method):
    """A combination of methods, which behaves as one method."""

    parts: Parts = ()
    """First the method that a config names, then those of its `with`."""

    def __post_init__(self) -> None:
        names = [name for name, _ in self.parts]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise UserError(f"method.with: must be different methods, got {twice!r} twice")
        for function in (
            "predict",
            "predict_features",
            "predict_from_features",
            "route",
            "wrap_network",
        ):
            refuse_two_owners(function, self._owners(function))
        for function in ("predict_features", "predict_from_features"):
            refuse_two_owners(
                "predict", sorted({*self._owners("predict"), *self._owners(function)})
            )
        self._check_layers()
        self.needs  # noqa: B018  (refuses preferences that differ)

    def _owners(self, function: str) -> list[str]:
        """Return the names of the parts that override a function of the contract."""
        default = getattr(Method, function)
        return [name for name, part in self.parts if getattr(type(part), function) is not default]

    def _check_layers(self) -> None:
        wrapping = self._owners("wrap_network")
        for name, part in self.parts:
            if wrapping and part.needs.layers != "any":
                raise UserError(
                    f"method.with: must be methods that do not need trained layers, which "
                    f"{wrapping[0]!r} freezes, got {name!r}"
                )

    @cached_property
    def ServerState(self) -> type:  # type: ignore[override]
        """The parts' server states, by name."""
        return _state_class(
            "CombinedServerState", [(n, part.ServerState) for n, part in self.parts]
        )

    @cached_property
    def ClientState(self) -> type:  # type: ignore[override]
        """The parts' client states, by name."""
        return _state_class(
            "CombinedClientState", [(n, part.ClientState) for n, part in self.parts]
        )

    @cached_property
    def needs(self) -> Needs:
        """The needs of all parts together."""
        by_part = [(name, part.needs) for name, part in self.parts]
        streams = [needs.streams for _, needs in by_part]
        return Needs(
            streams=frozenset.intersection(*streams),
            classes=any(needs.classes for _, needs in by_part),
            prefers=_common_preferences([(name, needs.prefers) for name, needs in by_part]),
            max_client_weight=max(needs.max_client_weight for _, needs in by_part),
            per_client_fields=tuple(
                combined_field(n, f) for n, x in by_part for f in x.per_client_fields
            ),
            prediction_state=tuple(
                f"{state_field(n)}.{f}" for n, x in by_part for f in x.prediction_state
            ),
            layers=_strictest_layers([needs for _, needs in by_part]),
            stable_features=any(needs.stable_features for _, needs in by_part),
            cumulative=all(needs.cumulative for _, needs in by_part),
            stored_examples=any(needs.stored_examples for _, needs in by_part),
            personal=any(needs.personal for _, needs in by_part),
            task_aware=any(needs.task_aware for _, needs in by_part),
        )

    def check_config(self, config: Any) -> str | None:
        """Return the reason of the first part that refuses the config, or None."""
        return next(filter(None, (part.check_config(config) for _, part in self.parts)), None)

    def wrap_network(self, network: Network) -> Network:
        """Return the network as the one part wraps it that does, else unchanged."""
        for _, part in self.parts:
            network = part.wrap_network(network)
        return network

    def exchanges(self, context: Context) -> list[Exchange | Train]:
        """Return the parts' exchanges, with their Trains merged into one."""
        split = [(name, split_exchanges(part.exchanges(context))) for name, part in self.parts]
        self._check_forward_pass(split)
        first = sorted(split, key=lambda part: part[0] not in self._owners("wrap_network"))
        opening = [part_exchange(name, e) for name, task in first for e in task.opening]
        ending = [self._ending(name, e) for name, task in split for e in task.ending]
        merged = MergedTrain(tuple((name, task.train) for name, task in split))
        return [*opening, merged.train(), *ending]

    def _ending(self, name: str, exchange: Exchange) -> Exchange:
        """Return a part's task-end exchange, in which clients have all parts' stored examples."""
        ending = part_exchange(name, exchange)
        work = ending.client_work
        return replace(ending, client_work=work and with_stored(work, self.stored_batches))

    def stored_batches(self, client: Client) -> Iterator[Batch]:
        """Yield the stored examples of all parts."""
        views = [
            part_client(client, name) for name, part in self.parts if part.needs.stored_examples
        ]
        return chain.from_iterable(view.state.stored_batches(view) for view in views)

    def _check_forward_pass(self, split: list[tuple[str, TaskExchanges]]) -> None:
        wrapping = self._owners("wrap_network")
        for name, (_, train, _) in split:
            uses_forward_pass = train.extra_rows or train.loss or train.penalty
            if wrapping and uses_forward_pass and name not in wrapping:
                raise UserError(
                    "method.with: must be methods without extra rows, loss or penalty beside "
                    f"{wrapping[0]!r}, which replaces the forward pass, got {name!r}"
                )

    def predict(
        self, server: Server, x: Tensor, network: Network,
        client_state: Any = None, task: int | None = None,
    ) -> Tensor:  # fmt: skip
        """Return the logits of the part that predicts in its own way.

        If there is none, one part's features are classified by the part that has its own head.
        """
        if self._owners("predict"):
            return self._call("predict", server, x, network, client_state, task)
        features = self._call("predict_features", server, x, network, client_state, task)
        return self._call("predict_from_features", server, features, network, client_state, task)

    def _call(
        self, function: str, server: Server, x: Tensor, network: Network, client_state: Any,
        task: int | None,
    ) -> Tensor:  # fmt: skip
        """Call a function of prediction of the one part that has it, with that part's states."""
        name, part = self._owner(function)
        part_state = _part_state(client_state, name)
        logits: Tensor = getattr(part, function)(
            part_server(server, name), x, network, part_state, task
        )
        return logits

    def route(
        self, server: Server, x: Tensor, network: Network, client_state: Any = None
    ) -> Tensor | None:
        """Return what the one part that can route returns, or None."""
        name, part = self._owner("route")
        return part.route(part_server(server, name), x, network, _part_state(client_state, name))

    def for_mixed_rows(self) -> Combined:
        """Return the combination of the parts as they predict rows of several tasks."""
        return replace(self, parts=tuple((name, p.for_mixed_rows()) for name, p in self.parts))

    def _owner(self, function: str) -> tuple[str, Method]:
        owners = self._owners(function)
        return next((part for part in self.parts if part[0] in owners), self.parts[0])

    def diagnose(self, server: Server, context: Context) -> Diagnosis:
        """Return each part's numbers under its name, its warnings, their keys with its name."""
        found = {n: part.diagnose(part_server(server, n), context) for n, part in self.parts}
        numbers: Tree = {n: each.numbers for n, each in found.items() if each.numbers}
        warnings = {
            f"{name}.{key}": text
            for name, each in found.items()
            for key, text in each.warnings.items()
        }
        hints = filter(None, (each.divergence for each in found.values()))
        return Diagnosis(numbers, warnings, ", or ".join(hints))


def _state_class(name: str, kinds: list[tuple[str, type]]) -> type:
    fields = [(state_field(part), kind, field(default_factory=kind)) for part, kind in kinds]
    return make_dataclass(name, fields, frozen=True)


def _common_preferences(by_part: list[tuple[str, Preferences]]) -> Preferences:
    """Return the preferences of all parts together; refuse those that differ."""
    each = [prefers for _, prefers in by_part]
    preferred = {prefers.active_outputs for prefers in each}
    widest = next((outputs for outputs in _WIDEST if outputs in preferred), None)
    own = [(name, prefers) for name, prefers in by_part if prefers.weighting == "own"]
    return Preferences(
        head=_common_heads(each),
        active_outputs=widest,
        weighting=_common_preference("weighting", own or by_part),
        server_lr=_common_preference("server_lr", by_part),
        server_schedule=_common_preference("server_schedule", by_part),
        demanded={key: why for prefers in each for key, why in prefers.demanded.items()},
    )


def _common_heads(each: list[Preferences]) -> dict[str, Literal["shared", "growing"]]:
    """Return the heads that the parts prefer; where they differ, the demanded one, or shared."""
    heads: dict[str, Literal["shared", "growing"]] = {}
    for prefers in sorted(each, key=lambda prefers: "head" in prefers.demanded):
        for stream, kind in prefers.head.items():
            agreed = "head" in prefers.demanded or heads.get(stream, kind) == kind
            heads[stream] = kind if agreed else "shared"
    return heads


def _common_preference(key: str, by_part: list[tuple[str, Preferences]]) -> Any:
    """Return the preference of the parts that have one; refuse preferences that differ."""
    preferred = {name: getattr(prefers, key) for name, prefers in by_part}
    preferred = {name: value for name, value in preferred.items() if value is not None}
    if len(set(preferred.values())) > 1:
        refuse_two_owners(key, list(preferred))
    return next(iter(preferred.values()), None)


def _strictest_layers(by_part: list[Needs]) -> Literal["any", "trained", "protected"]:
    """Return what the part that asks most of the layers needs of them."""
    return max((needs.layers for needs in by_part), key=("any", "trained", "protected").index)


def _part_state(state: Any, name: str) -> Any:
    return None if state is None else getattr(state, state_field(name))
