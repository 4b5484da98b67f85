"""Create a federation: folders for the server and the nodes, with keys, start scripts, a README."""

from __future__ import annotations

import shutil
import stat
from pathlib import Path

from perdure.core.errors import UserError
from perdure.core.files import write_atomic
from perdure.flower.folders import NodeFolder, ServerFolder, check_host, node_name
from perdure.flower.node_policy import NodePolicy


def create_federation(
    path: Path, nodes: int, host: str, port: int, policy: NodePolicy | None = None
) -> None:
    """Write everything that a federation needs before its first run.

    Args:
        path: A folder that is new or empty.
        nodes: Number of nodes.
        host: Name or address under which nodes reach the server.
        port: Port of the server.
        policy: What the owners of nodes allow. Default: what real nodes allow.

    Raises:
        UserError: `path` is not empty, or `host` is not valid.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UserError(f"{path}: must be a folder that is new or empty")
    check_host(host)
    from perdure.flower.keys import write_authority, write_server_certificate

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
    from perdure.flower.keys import write_node_key

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
