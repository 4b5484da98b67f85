"""The folders of a federation: the server's and one per node, and how they are created."""

from __future__ import annotations

import re
import shutil
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import AfterValidator, Field, ValidationError
from pydantic_core import PydanticCustomError

from perdure.config.section import NOT_BOOL, ConfigSection, NonNegativeInt, PositiveInt
from perdure.config.sentences import describe
from perdure.core.documents import read_yaml_value
from perdure.core.errors import InUse, UserError, bad_value
from perdure.core.files import write_atomic
from perdure.federation.node.policy import NodePolicy, read_policy
from perdure.runs.directory import FileLock, LockHeld

# ---- The folders of a federation: the server's, and one per node

_HOST = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9.:-]*[A-Za-z0-9])?")
_File = TypeVar("_File", bound=ConfigSection)


def _check_address(address: str) -> str:
    host, _, port = address.rpartition(":")
    if not _HOST.fullmatch(host.strip("[]")) or not re.fullmatch("[0-9]{1,5}", port):
        raise PydanticCustomError("address", "the server's address as host:port")
    return address


class _ServerFile(ConfigSection):
    """What server.yaml holds."""

    port: Annotated[int, Field(ge=1, le=65535), NOT_BOOL]
    nodes: PositiveInt


class _NodeFile(ConfigSection):
    """What node.yaml holds."""

    number: NonNegativeInt
    server: Annotated[str, AfterValidator(_check_address)]
    policy: Any = None  # checked by read_policy


@dataclass(frozen=True)
class ServerFolder:
    """A server's folder: certificates, node keys, submissions and Flower's state."""

    path: Path
    """The folder."""
    port: int
    """Port on which the server listens."""
    nodes: int
    """Number of nodes."""

    @classmethod
    def read(cls, path: Path) -> ServerFolder:
        """Read the folder that `perdure federation init` created for the server."""
        values = _read(path / "server.yaml", "a server", _ServerFile)
        return cls(path.resolve(), values.port, values.nodes)

    def write(self) -> None:
        """Write server.yaml."""
        _write(self.path / "server.yaml", {"port": self.port, "nodes": self.nodes})

    @property
    def flower(self) -> Path:
        """Flower's home folder."""
        return self.path / "flower"

    @property
    def submissions(self) -> Path:
        """The folder with one folder per submitted run."""
        return self.path / "submissions"

    def public_keys(self) -> list[tuple[str, Path]]:
        """Return name and public key file of each node that may connect."""
        return [(path.stem, path) for path in sorted((self.path / "nodes").glob("*.pub"))]


@dataclass(frozen=True)
class NodeFolder:
    """A node's folder: its key, and the address of its server."""

    path: Path
    """The folder."""
    number: int
    """Index of the node."""
    server: str
    """Address of the server, as host:port."""
    policy: NodePolicy = field(default_factory=NodePolicy)
    """What the owner of the node allows."""

    @classmethod
    def read(cls, path: Path) -> NodeFolder:
        """Read the folder that `perdure federation init` created for a node."""
        values = _read(path / "node.yaml", "a node", _NodeFile)
        policy = read_policy({"policy": values.policy}, str(path / "node.yaml"))
        return cls(path.resolve(), values.number, values.server, policy)

    def write(self) -> None:
        """Write node.yaml, with all keys of the policy, so that its owner sees what can be set."""
        policy = self.policy.model_dump(mode="json")
        values = {"number": self.number, "server": self.server, "policy": policy}
        _write(self.path / "node.yaml", values)

    @property
    def state(self) -> Path:
        """The folder in which clients store what they keep, one folder per run."""
        return self.path / "state"


@contextmanager
def only_process(folder: Path, owner: str) -> Iterator[None]:
    """Keep other processes of its kind out of a folder while the block runs.

    Raises:
        InUse: Another process runs in it.

    """
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire()
    except LockHeld:
        raise InUse(
            f"{folder}: a {owner} runs in this folder already (process {lock.holder()}); stop it, "
            f"or start this one in another folder"
        ) from None
    try:
        yield
    finally:
        lock.release()


def node_name(number: int) -> str:
    """Return the name under which a node is registered; its key proves its identity."""
    return f"node-{number}"


def node_number(name: str) -> int | None:
    """Return the index of the node with this name, or None for other names."""
    match = re.fullmatch(r"node-(\d{1,9})", name)
    return int(match[1]) if match else None


def check_host(host: str) -> str:
    """Return `host` if it is a valid name or address.

    Raises:
        UserError: It is not.

    """
    if not _HOST.fullmatch(host):
        raise bad_value("--host", host, "a host name or an IP address")
    return host


def check_own_address(host: str) -> str:
    """Return `host` if this machine can listen on it.

    Raises:
        UserError: It cannot.

    """
    try:
        addresses = socket.getaddrinfo(check_host(host), 0, type=socket.SOCK_STREAM)
        family, kind, _, _, address = addresses[0]
        with socket.socket(family, kind) as probe:
            probe.bind(address)
    except OSError as error:
        expected = f"an address of this machine, or 0.0.0.0 for all ({error.strerror})"
        raise bad_value("--host", host, expected) from None
    return host


def _read(path: Path, owner: str, file: type[_File]) -> _File:
    if not path.is_file():
        raise UserError(
            f"{path.parent}: must be the folder of {owner}, but it has no {path.name}; "
            "create one with: perdure federation init"
        )
    values = read_yaml_value(path)
    if not isinstance(values, dict):
        raise bad_value(str(path), values, f"a mapping with {', '.join(file.model_fields)}")
    try:
        return file.model_validate(values)
    except ValidationError as error:
        raise UserError(f"{path}: {describe(error.errors()[0], section=file)}") from None


def _write(path: Path, values: dict[str, Any]) -> None:
    write_atomic(path, yaml.safe_dump(values, sort_keys=False).encode())


# ---- Create a federation: folders for the server and the nodes, with keys, start scripts, a README


def create_federation(
    path: Path, nodes: int, host: str, port: int, policy: NodePolicy | None = None
) -> None:
    """Write everything that a federation needs before its first run.

    Raises:
        UserError: `path` is not empty, or `host` is not valid.

    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UserError(f"{path}: must be a folder that is new or empty")
    check_host(host)
    from perdure.federation.admin.keys import write_authority, write_server_certificate

    authority, server = path / "authority", path / "server"
    for folder in (authority, server / "nodes"):
        folder.mkdir(parents=True, exist_ok=True)
    write_authority(authority)
    shutil.copy(authority / "ca.pem", server / "ca.pem")
    write_server_certificate(server, authority, [host])
    ServerFolder(server, port, nodes).write()
    is_loopback = host in ("localhost", "127.0.0.1")
    host_option = "" if is_loopback else " --host 0.0.0.0"
    _write_start(server, f"perdure federation server .{host_option}", "perdure federation server")
    for number in range(nodes):
        _create_node(path, number, f"{host}:{port}", policy or NodePolicy())
    for folder in path.iterdir():  # keys, and later what clients store
        folder.chmod(0o700)
    page = _README.format(
        nodes=nodes, host=host, port=port, last=nodes - 1, host_option=host_option
    )
    write_atomic(path / "README.md", page.encode())


def _create_node(path: Path, number: int, server: str, policy: NodePolicy) -> None:
    from perdure.federation.admin.keys import write_node_key

    name = node_name(number)
    folder = path / name
    folder.mkdir()
    write_node_key(folder / "node.key", path / "server" / "nodes" / f"{name}.pub")
    shutil.copy(path / "authority" / "ca.pem", folder / "ca.pem")
    NodeFolder(folder, number, server, policy).write()
    _write_start(
        folder, 'perdure federation node . --data "${1:-data}"', f"perdure federation {name}"
    )


def _write_start(folder: Path, command: str, title: str) -> None:
    """Write a start script, and a systemd unit that keeps it running."""
    script = folder / "start.sh"
    text = f'#!/bin/sh\nset -eu\ncd "$(dirname "$0")"\nexec {command}\n'
    script.write_text(text, encoding="utf-8")
    script.chmod(script.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP)
    unit = [
        "# Copy to /etc/systemd/system, set the three values that begin with /, then:",
        f"# systemctl enable --now perdure-{folder.name}",
        "[Unit]",
        f"Description={title}",
        "Wants=network-online.target",
        "After=network-online.target",
        "[Service]",
        f"WorkingDirectory=/srv/perdure/{folder.name}",
        f"ExecStart=/srv/perdure/{folder.name}/start.sh",
        "Environment=PATH=/srv/perdure/venv/bin:/usr/bin:/bin",
        "Restart=always",
        "RestartSec=5",
        "[Install]",
        "WantedBy=multi-user.target",
    ]
    unit_file = folder / f"perdure-{folder.name}.service"
    unit_file.write_text("\n".join(unit) + "\n", encoding="utf-8")


_README = """# This federation

{nodes} nodes and one server at `{host}`, port {port}. Created by `perdure federation init`.

| folder | goes to | holds |
|---|---|---|
| `authority/` | a safe place, not a machine of the federation | the key that certifies servers |
| `server/` | the server | its certificate and key, the public keys of nodes, later all runs |
| `node-0/` to `node-{last}/` | one machine each | its private key, the authority's certificate |

Copy each folder to its machine over a safe channel (it holds a private key) and delete it here.
On every machine: `pip install 'perdure[flower]'`, the same version everywhere. Then

    cd server && ./start.sh               # on the server: perdure federation server .{host_option}
    cd node-0 && ./start.sh /path/to/data # on each node: perdure federation node . --data FOLDER
    perdure federation submit CONFIG --server server   # on the server: start a run

Each folder also has a systemd unit. The logs are in `server/log` and `node-*/log`.

The server's port serves nodes only, which prove their identity by keys; runs are submitted on the
server by users that can read `server/flower`, since a run may contain code. Still, keep the port
closed to all machines except the nodes. The server's certificate ends after 825 days: from 30 days
before, server and nodes warn when they start, and

    perdure federation renew server --authority authority

writes a new one. See docs/federation.md.
"""
