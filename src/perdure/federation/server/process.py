"""Run the server as a child process: Flower's SuperLink, with the registered nodes."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from perdure.core.errors import RunError
from perdure.core.files import write_atomic
from perdure.federation.admin.folders import ServerFolder, only_process
from perdure.federation.admin.processes import (
    Child,
    call_flwr,
    executable,
    free_port,
    start_process,
    wait_for_port,
)
from perdure.federation.admin.submission import CONNECTION

log = logging.getLogger(__name__)
_REGISTERED = "registered.json"


@contextmanager
def running_server(
    folder: ServerFolder, host: str = "127.0.0.1", persistent: bool = True
) -> Iterator[Child]:
    """Run a server while the block runs, and yield its process.

    Raises:
        InUse: Another server runs in the folder.

    """
    with only_process(folder.path, "server"):  # before anything else, which could disturb it
        if not persistent:
            (folder.path / _REGISTERED).unlink(missing_ok=True)
        local_port = free_port()
        _write_connection(folder, local_port)
        command = _command(folder, host, local_port, persistent)
        child = start_process("flower-superlink", command, folder.flower, _log(folder))
        try:
            wait_for_port(local_port, child)
            register(folder)
            yield child
        finally:
            child.stop()


def _command(folder: ServerFolder, host: str, local_port: int, persistent: bool) -> list[str]:
    path = folder.path
    database = ["--database", str(path / "state.db")] if persistent else []
    return [
        sys.executable, "-m", "perdure.federation.server.superlink", host, str(folder.port),
        executable("flower-superlink"),
        "--host", "127.0.0.1", "--port", str(local_port),
        "--ssl-ca-certfile", str(path / "ca.pem"),
        "--ssl-certfile", str(path / "server.pem"),
        "--ssl-keyfile", str(path / "server.key"),
        "--enable-supernode-auth",
        *database,
    ]  # fmt: skip


def _log(folder: ServerFolder) -> Path:
    return folder.path / "log" / "server.log"


def _write_connection(folder: ServerFolder, local_port: int) -> None:
    """Write the file in which Flower's command finds the server."""
    folder.flower.mkdir(parents=True, exist_ok=True)
    lines = [
        "[superlink]",
        f'default = "{CONNECTION}"',
        "",
        f"[superlink.{CONNECTION}]",
        f'address = "127.0.0.1:{local_port}"',
        f"root-certificates = {json.dumps(str(folder.path / 'ca.pem'))}",
    ]
    write_atomic(folder.flower / "config.toml", ("\n".join(lines) + "\n").encode())


def register(folder: ServerFolder) -> None:
    """Register the nodes whose public keys are in the server's folder, each under its name.

    Raises:
        RunError: Flower refuses a key.

    """
    path = folder.path / _REGISTERED
    registered: list[str] = json.loads(path.read_text()) if path.is_file() else []
    keys = {
        f"{name} {key.read_text(encoding='ascii').strip()}": (name, key)
        for name, key in folder.public_keys()
    }
    new = [entry for entry in keys if entry not in registered]
    if not new:
        return
    calls = [
        ["supernode", "register", str(key), CONNECTION, "--name", name]
        for name, key in (keys[entry] for entry in new)
    ]
    outcomes = call_flwr(calls, folder.flower)
    for entry, (succeeded, output) in zip(new, outcomes, strict=True):
        # already: the server was killed after registering and before writing the file
        if not succeeded and "already" not in output:
            raise RunError(f"{keys[entry][0]} cannot be registered: {output}")
        log.info("%s is registered", keys[entry][0])
    write_atomic(path, json.dumps([*registered, *new], indent=1).encode())
