"""A stranger who reaches the nodes' port, or a port of loopback without the token, submits nothing.

Tried with Flower's own commands and with plain requests against a real server: submit a run,
register a node, list runs, ask for the work of the executor, read the interface's description.
"""

from __future__ import annotations

import os
import shutil
import ssl
import stat
import tomllib
import urllib.error
import urllib.request

import pytest

from perdure.federation.admin.folders import ServerFolder, create_federation
from perdure.federation.admin.processes import CONNECTION, call_flwr, free_port, running_server

PATHS = (
    "/v1/control/start-run",
    "/v1/control/list-runs",
    "/v1/control/register-node",
    "/v1/control/get-login-details",
    "/v1/runtime/acquire-task",
    "/v1/fleet/../control/start-run",
    "/v1/fleet/%2e%2e/control/start-run",
    "//v1/control/start-run",
    "/docs",
    "/openapi.json",
    "/health",
)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server without nodes, and its folder."""
    home = tmp_path_factory.mktemp("submission") / "home"
    create_federation(home, 1, "localhost", free_port())
    folder = ServerFolder.read(home / "server")
    with running_server(folder):
        yield folder


def status(folder: ServerFolder, port: int, path: str) -> int:
    """Return the status of a POST request without content."""
    context = ssl.create_default_context(cafile=str(folder.path / "ca.pem"))
    request = urllib.request.Request(f"https://127.0.0.1:{port}{path}", data=b"", method="POST")
    try:
        with urllib.request.urlopen(request, context=context, timeout=60) as reply:
            return reply.status
    except urllib.error.HTTPError as error:
        return error.code


def local_port(folder: ServerFolder) -> int:
    connections = tomllib.loads((folder.flower / "config.toml").read_text())
    return int(connections["superlink"][CONNECTION]["address"].rpartition(":")[2])


@pytest.mark.parametrize("path", PATHS)
def test_the_nodes_port_serves_nothing_else(server, path):
    assert status(server, server.port, path) == 404


def test_the_nodes_port_asks_nodes_for_their_signature(server):
    assert status(server, server.port, "/v1/fleet/pull-messages") in (400, 401, 415, 422)


def test_commands_and_the_executor_must_authenticate_on_loopback(server):
    port = local_port(server)
    for path in PATHS[:3]:
        assert status(server, port, path) == 401
    assert status(server, port, "/v1/runtime/acquire-task") in (400, 401, 403, 415, 422)


def stranger(server: ServerFolder, tmp_path, port: int):
    """Return Flower's home of a user who has the certificate of the authority and no token."""
    home = tmp_path / f"flower-{port}"
    home.mkdir()
    text = (server.flower / "config.toml").read_text()
    (home / "config.toml").write_text(text.replace(f":{local_port(server)}", f":{port}"))
    return home


def test_flowers_commands_of_a_stranger_are_refused(server, tmp_path):
    app = tmp_path / "app"
    app.mkdir()
    shutil.copy(__file__, app / "code.py")
    (app / "LICENSE").write_text("none")
    (app / "pyproject.toml").write_text(
        '[project]\nname = "app"\nversion = "0.1.0"\ndescription = "a"\n'
        'license = { file = "LICENSE" }\ndependencies = []\n'
        '[tool.flwr.app]\npublisher = "nobody"\n[tool.flwr.app.components]\n'
        'serverapp = "code:server"\nclientapp = "code:client"\n'
    )
    calls = [["run", str(app), CONNECTION, "--format", "json"], ["ls", CONNECTION]]
    for port in (server.port, local_port(server)):
        for succeeded, output in call_flwr(calls, stranger(server, tmp_path, port)):
            assert not succeeded or "run-id" not in output, output
            assert '"success": true' not in output.lower(), output
    ((listed, output),) = call_flwr([["ls", CONNECTION, "--format", "json"]], server.flower)
    assert listed, output
    assert "nobody" not in output


def test_token_and_secret_are_their_owners(server):
    for name in ("credentials.yaml", "superexec.secret"):
        assert stat.S_IMODE(os.stat(server.flower / name).st_mode) == 0o600
