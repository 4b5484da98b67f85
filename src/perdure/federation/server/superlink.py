"""Run Flower's server with two ports: one for the nodes, one for the owner of this machine.

Flower serves everything at one port: the nodes' messages, the commands that submit runs, and the
work of its own processes. Only nodes have to authenticate. Here the port that other machines reach
serves the nodes' messages alone. All else is served at a port of loopback, where commands need a
token, and Flower's executor needs a secret. Both are drawn at every start and kept in files of
Flower's home folder that only their owner can read.

Started as `python -m perdure.federation.server.superlink HOST PORT flower-superlink ...` with the
address for the nodes and Flower's command, whose `--host` and `--port` are the loopback port.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, MutableMapping, Sequence

    from flwr.superlink.auth_plugin import ControlAuthnPlugin

    Scope = MutableMapping[str, Any]
    Receive = Callable[[], Awaitable[Scope]]
    Send = Callable[[Scope], Awaitable[None]]
    App = Callable[[Scope, Receive, Send], Awaitable[None]]

_NODE_PATHS = "/v1/fleet/"
"""What nodes ask for; Flower checks their signature on each of these paths."""


class NodePort:
    """An ASGI application that serves only nodes at any port except one."""

    def __init__(self, app: App, local_port: int) -> None:
        """Serve an application."""
        self._app, self._local_port = app, local_port

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or reply 404 as if the path did not exist."""
        if scope["type"] == "lifespan" or self._is_open(scope):
            await self._app(scope, receive, send)
            return
        headers = [(b"content-length", b"0")]
        await send({"type": "http.response.start", "status": 404, "headers": headers})
        await send({"type": "http.response.body", "body": b""})

    def _is_open(self, scope: Scope) -> bool:
        port = (scope.get("server") or ("", None))[1]  # of the socket, not what the request says
        is_for_nodes = scope["type"] == "http" and scope["path"].startswith(_NODE_PATHS)
        return port == self._local_port or is_for_nodes


def token_plugin(token: str) -> ControlAuthnPlugin:
    """Return a plugin of Flower that accepts commands with a token."""
    from flwr.common.constant import ACCESS_TOKEN_KEY
    from flwr.supercore.auth.typing import AccountInfo
    from flwr.superlink.auth_plugin import NoOpControlAuthnPlugin

    class TokenPlugin(NoOpControlAuthnPlugin):
        """Flower's plugin for servers without accounts, with a check of the token."""

        def validate_tokens_in_metadata(
            self, metadata: Sequence[tuple[str, str | bytes]]
        ) -> tuple[bool, AccountInfo | None]:
            """Return whether the token was sent, and the one account that there is."""
            sent = dict(metadata).get(ACCESS_TOKEN_KEY, "")
            sent = sent.encode() if isinstance(sent, str) else sent
            if not hmac.compare_digest(sent, token.encode()):
                return False, None
            return super().validate_tokens_in_metadata(metadata)

        def refresh_tokens(
            self, metadata: Sequence[tuple[str, str | bytes]]
        ) -> tuple[Sequence[tuple[str, str | bytes]] | None, AccountInfo | None]:
            """Return that there are no other tokens."""
            return None, None

    return TokenPlugin()


def store_token(address: str, token: str) -> None:
    """Store the token where Flower's command looks for it, in a file of Flower's home folder."""
    from flwr.cli import constant
    from flwr.common.constant import AuthnType
    from flwr.supercore.credential_store import get_credential_store

    (_home() / "credentials.yaml").unlink(missing_ok=True)  # of earlier starts
    store = get_credential_store()
    store.set(constant.AUTHN_TYPE_STORE_KEY % address, AuthnType.OIDC.encode())
    store.set(constant.ACCESS_TOKEN_STORE_KEY % address, token.encode())
    store.set(constant.REFRESH_TOKEN_STORE_KEY % address, b"none")


def main(host: str, port: int, command: list[str]) -> None:
    """Run Flower's server until it is ended."""
    flower: Any = import_module("flwr.superlink.cli.flower_superlink")  # a function has its name
    secret, secret_file = secrets.token_bytes(32), _home() / "superexec.secret"
    _write_secret(secret_file, secret)
    token = secrets.token_urlsafe(32)
    superexec_command = flower._get_superexec_command

    def serve(app: Any, **settings: Any) -> None:
        app.state.superexec_auth_secret = secret
        store_token(f"{settings['host']}:{settings['port']}", token)
        _serve(app, (host, port), settings)

    # Flower has no options for these
    flower.load_control_authn_plugin = lambda: token_plugin(token)
    flower._get_superexec_command = lambda **values: [
        *superexec_command(**values),
        "--superexec-auth-secret-file",
        str(secret_file),
    ]
    flower.uvicorn = SimpleNamespace(run=serve)
    sys.argv = command
    flower.flower_superlink()


def _home() -> Path:
    return Path(os.environ["FLWR_HOME"])


def _write_secret(path: Path, secret: bytes) -> None:
    path.unlink(missing_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(secret)


def _serve(app: Any, for_nodes: tuple[str, int], settings: dict[str, Any]) -> None:
    """Serve an app at its own address and, for nodes, at another."""
    import uvicorn

    local = (settings["host"], settings["port"])
    config = uvicorn.Config(NodePort(app, local[1]), **settings)
    uvicorn.Server(config).run(sockets=[_listen(*local), _listen(*for_nodes)])


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        sys.exit(f"failed to listen on {host}:{port}: {error.strerror}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
