"""Run Flower's commands as child processes that end with this process, even if it is killed."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from perdure.core.errors import RunError
from perdure.core.registry import missing_extra

_WATCHDOG = Path(__file__).with_name("watchdog.py")
_CALLS = Path(__file__).with_name("flwr_calls.py")
_CALL_SECONDS = 600.0
_TERMINATE_SECONDS = 20.0
_POLL_SECONDS = "0.2"
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
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": _POLL_SECONDS,
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
            [sys.executable, str(_WATCHDOG), *command],
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
        [sys.executable, str(_CALLS)],
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
