"""What other machines reach of the server, without starting one (tests-federation does)."""

from __future__ import annotations

import asyncio
from importlib import import_module

import pytest

pytest.importorskip("flwr")
from flwr.common.constant import ACCESS_TOKEN_KEY

from perdure.federation.server.superlink import NodePort, token_plugin

LOCAL, NODES = 7000, 9410


def served(path: str, server: object, kind: str = "http") -> bool:
    """Return whether a request reaches the application behind the port; it gets 404 if not."""
    reached, sent = [], []

    async def app(scope, receive, send):
        reached.append(scope)

    async def send(message):
        sent.append(message)

    asyncio.run(NodePort(app, LOCAL)({"type": kind, "path": path, "server": server}, None, send))
    assert reached or sent[0]["status"] == 404
    return bool(reached)


@pytest.mark.parametrize(
    "path",
    ["/v1/control/start-run", "/v1/runtime/acquire-task", "/v1/fleet", "//v1/fleet/", "/docs", ""],
)
def test_only_paths_of_nodes_are_served_at_their_port(path):
    assert not served(path, ("0.0.0.0", NODES))
    assert not served(path, None), "a socket without an address counts as the nodes'"
    assert served(path, ("127.0.0.1", LOCAL))


def test_nodes_are_served_at_their_port():
    assert served("/v1/fleet/pull-messages", ("0.0.0.0", NODES))
    assert not served("/v1/fleet/pull-messages", ("0.0.0.0", NODES), "websocket")
    assert served("", None, "lifespan")


def test_commands_need_the_token():
    plugin = token_plugin("right")
    valid, account = plugin.validate_tokens_in_metadata([(ACCESS_TOKEN_KEY, "right")])
    assert valid
    assert account is not None
    for metadata in (
        [],
        [(ACCESS_TOKEN_KEY, "wrong")],
        [(ACCESS_TOKEN_KEY, b"")],
        [("x", "right")],
    ):
        assert plugin.validate_tokens_in_metadata(metadata) == (False, None)
    assert plugin.refresh_tokens([]) == (None, None)


def test_flower_has_the_functions_that_are_replaced():
    flower = import_module("flwr.superlink.cli.flower_superlink")
    for name in ("load_control_authn_plugin", "_get_superexec_command", "flower_superlink"):
        assert callable(getattr(flower, name))
    assert callable(flower.uvicorn.run)
