"""The server's processes: Flower's SuperLink, with the nodes that may take part registered."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from perdure.core.errors import RunError
from perdure.core.files import write_atomic
from perdure.flower.folders import ServerFolder
from perdure.flower.processes import Child, executable, flwr, start, wait_for_port
from perdure.flower.submission import CONNECTION

log = logging.getLogger(__name__)
_REGISTERED = "registered.json"


@contextmanager
def running_server(
    folder: ServerFolder, host: str = "127.0.0.1", lasting: bool = True
) -> Iterator[Child]:
    """A server that listens while the block runs.

    lasting: Flower's memory of nodes and messages is on disk, so that nodes that are there go on
    with the next server; else it is not, which saves two copies of every message on disk.
    """
    if not lasting:
        (folder.path / _REGISTERED).unlink(missing_ok=True)
    _write_connection(folder)
    command = _command(folder, host, lasting)
    child = start("flower-superlink", command, folder.flower, _log(folder))
    try:
        wait_for_port(folder.port, child)
        register(folder)
        yield child
    finally:
        child.stop()


def _command(folder: ServerFolder, host: str, lasting: bool) -> list[str]:
    path = folder.path
    memory = ["--database", str(path / "state.db")] if lasting else []
    return [
        executable("flower-superlink"),
        "--host", host, "--port", str(folder.port),
        "--ssl-ca-certfile", str(path / "ca.pem"),
        "--ssl-certfile", str(path / "server.pem"),
        "--ssl-keyfile", str(path / "server.key"),
        "--enable-supernode-auth",
        *memory,
    ]  # fmt: skip


def _log(folder: ServerFolder) -> Path:
    return folder.path / "log" / "server.log"


def _write_connection(folder: ServerFolder) -> None:
    """Where Flower's own command finds the server."""
    folder.flower.mkdir(parents=True, exist_ok=True)
    lines = [
        "[superlink]",
        f'default = "{CONNECTION}"',
        "",
        f"[superlink.{CONNECTION}]",
        f'address = "127.0.0.1:{folder.port}"',
        f"root-certificates = {json.dumps(str(folder.path / 'ca.pem'))}",
    ]
    write_atomic(folder.flower / "config.toml", ("\n".join(lines) + "\n").encode())


def register(folder: ServerFolder) -> None:
    """Let the nodes in whose public keys lie in the server's folder, each under its name."""
    path = folder.path / _REGISTERED
    known: list[str] = json.loads(path.read_text()) if path.is_file() else []
    keys = {
        f"{name} {key.read_text(encoding='ascii').strip()}": (name, key)
        for name, key in folder.public_keys()
    }
    new = [entry for entry in keys if entry not in known]
    if not new:
        return
    calls = [
        ["supernode", "register", str(key), CONNECTION, "--name", name]
        for name, key in (keys[entry] for entry in new)
    ]
    for entry, (good, said) in zip(new, flwr(calls, folder.flower), strict=True):
        if not good and "already" not in said:  # killed between registering and noting it down
            raise RunError(f"{keys[entry][0]} cannot be registered: {said}")
        log.info("%s may take part", keys[entry][0])
    write_atomic(path, json.dumps([*known, *new], indent=1).encode())
