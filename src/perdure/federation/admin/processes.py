"""Start and end Flower's processes: the server's SuperLink, a node's SuperNode, and commands.

They are child processes that end with this process, even if it is killed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from perdure.core.errors import RunError
from perdure.core.event_log import LineReader
from perdure.core.files import write_atomic
from perdure.core.registry import missing_extra
from perdure.federation.admin.folders import NodeFolder, ServerFolder, node_name, only_process

log = logging.getLogger(__name__)
CONNECTION = "perdure"
"""Name of the server in the settings of Flower's command."""
_SCRIPTS = str(Path(__file__).with_name("child_scripts.py"))
_CALL_SECONDS = 600.0
_TERMINATE_SECONDS = 20.0
_EXECUTOR_SECONDS = "0.2"
"""Interval at which Flower's executors look for work; shorter ones use noticeable CPU time."""


@dataclass
class Child:
    """A running command, whose output goes to a file."""

    name: str
    """Name in messages."""
    log: Path
    """File with the output."""
    process: subprocess.Popen[bytes]
    """The process."""
    log_start: int = 0
    """Offset of its output in the file, after that of earlier processes."""

    def stop(self) -> None:
        """End the process, by force if it does not end in time."""
        self.terminate()
        try:
            self.process.wait(_TERMINATE_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def terminate(self) -> None:
        """Ask the process to end, and do not wait. To end several, ask all of them first."""
        with contextlib.suppress(OSError):
            self.process.terminate()

    def check(self) -> None:
        """Check that the process runs.

        Raises:
            RunError: It has ended.

        """
        code = self.process.poll()
        if code is not None:
            raise RunError(
                f"{self.name} has ended with code {code}, see {self.log}{self._last_error()}"
            )

    def _last_error(self) -> str:
        """Return the last line about a failure; Flower's lines about its end come after it."""
        text = self.log.read_bytes()[self.log_start :].decode("utf-8", "replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        errors = [line for line in lines if "fail" in line.lower() or "error" in line.lower()]
        return f" (last error: {(errors or lines)[-1]})" if lines else ""


def executable(name: str) -> str:
    """Return the path of one of Flower's commands, first beside this interpreter.

    Raises:
        UserError: It is not installed.

    """
    interpreter_folder = str(Path(sys.executable).parent)
    path = shutil.which(name, path=interpreter_folder) or shutil.which(name)
    if path is None:
        raise missing_extra("engine.kind", "flower", f"the command {name} was not found")
    return path


def environment(home: Path) -> dict[str, str]:
    """Return the environment of Flower's processes, without telemetry, updates or installs."""
    interpreter_folder = str(Path(sys.executable).parent)
    # compiled files save every process a second
    inherited = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    return inherited | {
        "PATH": os.pathsep.join([interpreter_folder, os.environ.get("PATH", "")]),
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": _EXECUTOR_SECONDS,
    }


def start_process(
    name: str, command: list[str], home: Path, log: Path, threads: int | None = None
) -> Child:
    """Start a command under a watchdog."""
    defaults = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as out:
        log_start = out.tell()
        process = subprocess.Popen(
            [sys.executable, _SCRIPTS, "watch", *command],
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=defaults | environment(home),
            umask=0o077,  # what clients and server store is for their owner alone
        )
    return Child(name, log, process, log_start)


def call_flwr(calls: list[list[str]], home: Path) -> list[tuple[bool, str]]:
    """Call Flower's command several times."""
    executable("flwr")
    process = subprocess.run(
        [sys.executable, _SCRIPTS, "call"],
        input=json.dumps(calls),
        env=environment(home),
        capture_output=True,
        text=True,
        timeout=_CALL_SECONDS,
        check=False,
    )
    try:
        last = process.stdout.splitlines()[-1]
        return [(bool(ok), " ".join(str(output).split())) for ok, output in json.loads(last)]
    except (IndexError, ValueError):
        raise RunError(f"flwr: {' '.join(process.stderr.split())[-500:]}") from None


def free_port() -> int:
    """Return a port on loopback that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def wait_for_port(port: int, child: Child, seconds: float = 60.0) -> None:
    """Wait until a child listens on a port of loopback.

    Raises:
        RunError: The child ended, or does not listen in time.

    """
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        child.check()
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
            return
        time.sleep(0.2)
    raise RunError(f"{child.name} does not listen on port {port}, see {child.log}")


# ---- The server: Flower's SuperLink, with the registered nodes

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
        command = _server_command(folder, host, local_port, persistent)
        child = start_process(
            "flower-superlink", command, folder.flower, folder.path / "log" / "server.log"
        )
        try:
            wait_for_port(local_port, child)
            register(folder)
            yield child
        finally:
            child.stop()


def _server_command(
    folder: ServerFolder, host: str, local_port: int, persistent: bool
) -> list[str]:
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


# ---- A node: Flower's SuperNode, which passes on requests

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
