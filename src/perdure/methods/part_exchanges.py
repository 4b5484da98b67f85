"""Exchanges of one method as exchanges of a combination, in which it sees its own fields."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from perdure.contract.context import Client, Context, Server
from perdure.contract.exchanges import Exchange
from perdure.contract.step import Batch
from perdure.methods.merged_train import (
    combined_field,
    part_client,
    part_server,
    part_uploads,
    state_field,
)


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
