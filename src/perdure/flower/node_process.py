"""A node's process: Flower's SuperNode, which starts our work for every order."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from perdure.core.errors import RunError
from perdure.flower.folders import NodeFolder, node_name
from perdure.flower.processes import Child, executable, free_port, start

log = logging.getLogger(__name__)
_TURNED_AWAY = b"Failed to activate SuperNode"
"""What Flower says to a node whose key it does not know, and to one that comes back while the
server still takes its last life for alive. It does not say which."""
_PAUSE, _TRIES = 15.0, 12
"""A server notices within a minute or two that a node is gone."""


def run_node(folder: NodeFolder, data: Path | None = None) -> None:
    """Take part until the process ends; RunError then.

    Whoever lost power and is back within a minute or so is turned away by Flower, which has not
    noticed: a node tries again for a while.
    """
    log_file = folder.path / "log" / "node.log"
    for left in reversed(range(_TRIES)):
        begin = log_file.stat().st_size if log_file.is_file() else 0
        with running_nodes(folder, data) as child:
            child.process.wait()
            if _TURNED_AWAY not in log_file.read_bytes()[begin:]:
                child.check()
        reason = "its key is not registered there, or the server takes its last life for alive"
        if not left:
            raise RunError(f"{node_name(folder.number)} is turned away: {reason}")
        log.warning("turned away: %s; next try in %g s", reason, _PAUSE)
        time.sleep(_PAUSE)


@contextmanager
def running_nodes(
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
    port = free_port()
    command = [
        executable("flower-supernode"),
        "--superlink", folder.server,
        "--root-certificates", str(path / "ca.pem"),
        "--auth-supernode-private-key", str(path / "node.key"),
        "--port", str(port),
        "--node-config", said,
    ]  # fmt: skip
    name = node_name(folder.number)
    if sys.platform == "linux":  # elsewhere forks are not to be trusted, or do not exist
        served = [*command, "--isolation", "process"]
        command = [sys.executable, "-m", "perdure.flower.executor", str(port), *served]
    return start(name, command, path / "flower", path / "log" / "node.log", threads)
