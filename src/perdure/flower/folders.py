"""The folders of a federation: the server's, and one for each node."""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from perdure.core.errors import UserError, bad_value
from perdure.core.files import write_atomic

_HOST = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9.:-]*[A-Za-z0-9])?")


@dataclass(frozen=True)
class ServerFolder:
    """Certificates, node keys, submissions and Flower's state of a server."""

    path: Path
    port: int
    nodes: int

    @classmethod
    def read(cls, path: Path) -> ServerFolder:
        """The folder that `perdure federation init` made for the server."""
        values = _read(path / "server.yaml", "a server", ("port", "nodes"))
        return cls(path.resolve(), values["port"], values["nodes"])

    def write(self) -> None:
        """Leave server.yaml."""
        _write(self.path / "server.yaml", {"port": self.port, "nodes": self.nodes})

    @property
    def flower(self) -> Path:
        """Flower's own home."""
        return self.path / "flower"

    @property
    def submissions(self) -> Path:
        """One folder for each run that was handed in."""
        return self.path / "submissions"

    def public_keys(self) -> list[tuple[str, Path]]:
        """The nodes that may take part: name and public key."""
        return [(path.stem, path) for path in sorted((self.path / "nodes").glob("*.pub"))]


@dataclass(frozen=True)
class NodeFolder:
    """A node's key, and where its server is."""

    path: Path
    number: int
    server: str

    @classmethod
    def read(cls, path: Path) -> NodeFolder:
        """The folder that `perdure federation init` made for a node."""
        values = _read(path / "node.yaml", "a node", ("number", "server"))
        return cls(path.resolve(), values["number"], values["server"])

    def write(self) -> None:
        """Leave node.yaml."""
        _write(self.path / "node.yaml", {"number": self.number, "server": self.server})


def node_name(number: int) -> str:
    """The name under which a node is registered: its key proves that it is this one."""
    return f"node-{number}"


def node_number(name: str) -> int | None:
    """The inverse of node_name; None for other names."""
    found = re.fullmatch(r"node-(\d{1,9})", name)
    return int(found[1]) if found else None


def check_host(host: str) -> str:
    """A name or an address, or one sentence."""
    if not _HOST.fullmatch(host):
        raise bad_value("--host", host, "a host name or an IP address")
    return host


def check_own_address(host: str) -> str:
    """A name or an address on which this machine can listen, or one sentence."""
    try:
        found = socket.getaddrinfo(check_host(host), 0, type=socket.SOCK_STREAM)[0]
        family, kind, _, _, address = found
        with socket.socket(family, kind) as probe:
            probe.bind(address)
    except OSError as error:
        allowed = f"an address of this machine, or 0.0.0.0 for all ({error.strerror})"
        raise bad_value("--host", host, allowed) from None
    return host


def _read(path: Path, whose: str, keys: tuple[str, ...]) -> dict[str, Any]:
    if not path.is_file():
        raise UserError(
            f"{path.parent}: is not the folder of {whose} (it has no {path.name}), "
            "make one with: perdure federation init"
        )
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(values, dict) or any(key not in values for key in keys):
        raise bad_value(str(path), values, f"a mapping with {', '.join(keys)}")
    return values


def _write(path: Path, values: dict[str, Any]) -> None:
    write_atomic(path, yaml.safe_dump(values, sort_keys=False).encode())
