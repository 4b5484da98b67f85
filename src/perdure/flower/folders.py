"""The folders of a federation: the server's, and one per node."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import AfterValidator, Field, ValidationError
from pydantic_core import PydanticCustomError

from perdure.config.base import ConfigSection
from perdure.config.messages import describe
from perdure.config.types import NOT_BOOL, NonNegativeInt, PositiveInt
from perdure.core.errors import InUse, UserError, bad_value
from perdure.core.files import write_atomic
from perdure.core.yaml_text import read_yaml_value
from perdure.flower.node_policy import NodePolicy, read_policy
from perdure.runs.lock import FileLock, LockHeld

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

    Args:
        folder: The folder of a server or a node.
        owner: "server" or "node".

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
