"""Flower's executables as child processes that end with us, whatever happens to us."""

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
from perdure.core.optional import missing_extra

_WATCHDOG = Path(__file__).with_name("watchdog.py")
_CALLS = Path(__file__).with_name("flwr_calls.py")
_CALL_SECONDS = 600.0
_PATIENCE = 20.0
_POLL_SECONDS = "0.2"
"""Between two looks for work of each of Flower's executors, which cost a machine some percent."""


@dataclass
class Child:
    """A running command; its output goes to a file."""

    name: str
    log: Path
    process: subprocess.Popen[bytes]
    begin: int = 0
    """Where its output begins in the file, behind that of earlier ones."""

    def stop(self) -> None:
        """Ask it to end, and see that it does."""
        self.terminate()
        try:
            self.process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def terminate(self) -> None:
        """Only ask: who ends several asks all of them first."""
        with contextlib.suppress(OSError):
            self.process.terminate()

    def check(self) -> None:
        """RunError if it has ended."""
        code = self.process.poll()
        if code is not None:
            raise RunError(f"{self.name} has ended with code {code}, see {self.log}{self._last()}")

    def _last(self) -> str:
        """The last line that tells of a failure: what Flower says of its own end comes after it."""
        text = self.log.read_bytes()[self.begin :].decode("utf-8", "replace")
        lines = text.splitlines()
        said = [line.strip() for line in lines if line.strip()]
        telling = [line for line in said if "fail" in line.lower() or "error" in line.lower()]
        return f" (it said: {(telling or said)[-1]})" if said else ""


def executable(name: str) -> str:
    """The path of one of Flower's commands, which lie beside our own interpreter."""
    beside = shutil.which(name, path=str(Path(sys.executable).parent))
    found = beside or shutil.which(name)
    if found is None:
        raise missing_extra("engine.kind", "flower", f"the command {name} was not found")
    return found


def environment(home: Path) -> dict[str, str]:
    """The environment of Flower's processes: nothing is reported, fetched or installed."""
    here = str(Path(sys.executable).parent)
    # compiled files save every process a second
    ours = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    return ours | {
        "PATH": os.pathsep.join([here, os.environ.get("PATH", "")]),
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": _POLL_SECONDS,
    }


def start(
    name: str, command: list[str], home: Path, log: Path, threads: int | None = None
) -> Child:
    """Start a command under guard. `threads`: for its sums, where the user has not said."""
    usual = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as out:
        begin = out.tell()
        process = subprocess.Popen(
            [sys.executable, str(_WATCHDOG), *command],
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=usual | environment(home),
        )
    return Child(name, log, process, begin)


def flwr(calls: list[list[str]], home: Path) -> list[tuple[bool, str]]:
    """Call Flower's own command; for each call whether it went well, and what it said."""
    executable("flwr")
    done = subprocess.run(
        [sys.executable, str(_CALLS)],
        input=json.dumps(calls),
        env=environment(home),
        capture_output=True,
        text=True,
        timeout=_CALL_SECONDS,
        check=False,
    )
    try:
        last = done.stdout.splitlines()[-1]
        return [(bool(good), " ".join(str(said).split())) for good, said in json.loads(last)]
    except (IndexError, ValueError):
        raise RunError(f"flwr: {' '.join(done.stderr.split())[-500:]}") from None


def free_port() -> int:
    """A port on loopback that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def wait_for_port(port: int, child: Child, seconds: float = 60.0) -> None:
    """Wait until a child listens on a port of loopback."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        child.check()
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
            return
        time.sleep(0.2)
    raise RunError(f"{child.name} does not listen on port {port}, see {child.log}")
