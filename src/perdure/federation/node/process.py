"""Run a node as a child process: Flower's SuperNode, which passes on requests."""

from __future__ import annotations

import contextlib
import json
import logging
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from perdure.core.errors import RunError
from perdure.core.event_log import LineReader
from perdure.federation.admin.folders import NodeFolder, node_name
from perdure.federation.admin.processes import Child, executable, free_port, start_process

log = logging.getLogger(__name__)
_REFUSED = b"Failed to activate SuperNode"
"""Flower's message for a node whose key is not registered, and for one that reconnects while the
server still considers its previous connection alive. Flower does not distinguish the two."""
_GAVE_UP = b"SSL/TLS handshake error detected"
"""Flower's message when it stops to reconnect, as after a line was cut while a connection was made.
Its process then remains without a connection."""
_UNCERTIFIED = b"certificate verify failed"
_RETRY_SECONDS, ATTEMPTS = 15.0, 12
"""A server notices within a minute or two that a node is gone."""
POLL_SECONDS = 1.0
_KEY_REFUSED = (
    "its key is not registered, or the server still considers its previous connection alive"
)


def run_node(folder: NodeFolder, data: Path | None = None) -> None:
    """Run a node until its process ends.

    A node that restarts within a minute or so is refused by Flower, which has not noticed that it
    was gone; the node therefore retries for a while. A node whose line to the server is cut is
    started again until it is connected.

    Raises:
        RunError: The process ended, or the server refuses the node or is not certified.

    """
    log_file, refusals = folder.path / "log" / "node.log", 0
    while True:
        log_start = log_file.stat().st_size if log_file.is_file() else 0
        with running_node(folder, data) as child:
            gave_up = _wait_for_end(child, LineReader(log_file, from_end=True))
            output = log_file.read_bytes()[log_start:]
            is_refused = not gave_up and _REFUSED in output
            if not gave_up and not is_refused:
                child.check()
        if gave_up and _UNCERTIFIED in output:
            raise RunError(f"the server at {folder.server} is not certified by ca.pem")
        refusals = refusals + 1 if is_refused else 0
        if refusals >= ATTEMPTS:
            raise RunError(f"the server refuses {node_name(folder.number)}: {_KEY_REFUSED}")
        reason = f"the server refuses this node: {_KEY_REFUSED}" if is_refused else "no connection"
        log.warning("%s; retry in %g s", reason, _RETRY_SECONDS)
        pause(_RETRY_SECONDS)


def pause(seconds: float) -> None:
    time.sleep(seconds)


def _wait_for_end(child: Child, lines: LineReader) -> bool:
    """Wait until a node ends or gives up to reconnect, and return whether it gave up."""
    while child.process.poll() is None:
        gave_up = any(_GAVE_UP in line for line in lines.read_new())
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.process.wait(POLL_SECONDS)  # in which it also logs why it gave up
        if gave_up:
            return True
    return any(_GAVE_UP in line for line in lines.read_new())


@contextmanager
def running_node(
    folder: NodeFolder, data: Path | None = None, threads: int | None = None
) -> Iterator[Child]:
    """Run a node while the block runs, and yield its process; arguments as of `start_node`."""
    child = start_node(folder, data, threads)
    try:
        yield child
    finally:
        child.stop()


def start_node(folder: NodeFolder, data: Path | None = None, threads: int | None = None) -> Child:
    """Start a node's process."""
    path = folder.path
    folder.state.mkdir(mode=0o700, exist_ok=True)
    folder.state.chmod(0o700)
    settings = {"number": folder.number, "home": str(path), "state": str(folder.state)}
    if data is not None:
        settings["data"] = str(data.resolve())
    node_config = " ".join(f"{key}={json.dumps(value)}" for key, value in settings.items())
    port = free_port()
    command = [
        executable("flower-supernode"),
        "--superlink", folder.server,
        "--root-certificates", str(path / "ca.pem"),
        "--auth-supernode-private-key", str(path / "node.key"),
        "--port", str(port),
        "--node-config", node_config,
    ]  # fmt: skip
    name = node_name(folder.number)
    if sys.platform == "linux":  # elsewhere forks are unsafe or do not exist
        node_command = [*command, "--isolation", "process"]
        executor = [sys.executable, "-m", "perdure.federation.node.executor", str(port), str(path)]
        command = [*executor, *node_command]
    return start_process(name, command, path / "flower", path / "log" / "node.log", threads)
