"""A node's process: Flower's SuperNode, which starts our work for every order."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from perdure.engines.flower.folders import NodeFolder, node_name
from perdure.engines.flower.processes import Child, executable, free_port, start


@contextmanager
def taking_part(
    folder: NodeFolder, data: Path | None = None, threads: int | None = None
) -> Iterator[Child]:
    """A node that takes part while the block runs. `data`: its own; None: that of the config."""
    child = start_node(folder, data, threads)
    try:
        yield child
    finally:
        child.stop()


def start_node(folder: NodeFolder, data: Path | None = None, threads: int | None = None) -> Child:
    """Start a node's process."""
    path = folder.path
    settings = {"number": folder.number, "state": str(path / "state")}
    if data is not None:
        settings["data"] = str(data.resolve())
    said = " ".join(f"{key}={json.dumps(value)}" for key, value in settings.items())
    command = [
        executable("flower-supernode"),
        "--superlink", folder.server,
        "--root-certificates", str(path / "ca.pem"),
        "--auth-supernode-private-key", str(path / "node.key"),
        "--port", str(free_port()),
        "--node-config", said,
    ]  # fmt: skip
    name = node_name(folder.number)
    return start(name, command, path / "flower", path / "log" / "node.log", threads)
