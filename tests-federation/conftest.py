"""Federations of real processes: commands as a person types them, TLS, keys, loopback."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from perdure.federation.admin.processes import free_port

PERDURE = str(Path(sys.executable).with_name("perdure"))
PATIENCE = 600.0
"""Seconds to wait for anything: machines are shared, and no test may fail for being slow."""


class Process:
    """A command that runs beside the test, in a separate session."""

    def __init__(self, arguments: list[str], folder: Path, log: Path) -> None:
        self.log = log
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                [PERDURE, *arguments], cwd=folder, stdout=out, stderr=out, start_new_session=True
            )

    def stop(self, how: int = signal.SIGINT) -> int:
        """End it as Ctrl-C or as a crash would."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(how)
        return self.process.wait(PATIENCE)

    def output(self) -> str:
        return self.log.read_text(errors="replace")


class Federation:
    """A server and three nodes, created by `perdure federation init`."""

    def __init__(self, home: Path, data: Path | None = None) -> None:
        self.home, self.data, self.port = home, data, free_port()
        perdure("federation", "init", str(home), "--nodes", "3", "--port", str(self.port))
        if data is None:  # as in a trial: the config names the data, and methods of the tests
            self.set_policy(min_rows=0, code="any", files="any")
        self.server: Process | None = None
        self.nodes: dict[int, Process] = {}

    def set_policy(self, **policy) -> None:
        """Change the policy of all nodes."""
        for number in range(3):
            path = self.home / f"node-{number}" / "node.yaml"
            values = yaml.safe_load(path.read_text())
            values["policy"].update(policy)
            path.write_text(yaml.safe_dump(values))

    def start(self) -> None:
        self.start_server()
        for number in range(3):
            self.start_node(number)

    def start_server(self) -> None:
        self.server = Process(
            ["federation", "server", "server"], self.home, self.home / "server.out"
        )
        wait_for(lambda: "serving 3 nodes" in self.server.output(), "the server", self.server)

    def start_node(self, number: int) -> None:
        own = ["--data", str(self.data / f"node-{number}")] if self.data else []
        log = self.home / f"node-{number}.out"
        self.nodes[number] = Process(["federation", "node", f"node-{number}", *own], self.home, log)

    def kill_server(self) -> None:
        """Kill the server, and wait until what it started has noticed."""
        self.server.stop(signal.SIGKILL)
        wait_for(lambda: not self.server_processes(), "the end of what the server had started")

    def server_processes(self) -> list[str]:
        """Return what runs of the server: Flower's transport and the loop."""
        names = ("flower-superlink", "flwr-serverapp")
        return [c for c in flower_processes(self.home) if any(name in c for name in names)]

    def kill_node(self, number: int) -> None:
        """Kill all its processes at once, as when its machine loses power."""
        for process in processes_of(self.home / f"node-{number}"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self.nodes[number].stop(signal.SIGKILL)

    def stop(self) -> None:
        for process in [*self.nodes.values(), *([self.server] if self.server else [])]:
            with contextlib.suppress(ProcessLookupError):
                process.process.send_signal(signal.SIGINT)
        for process in [*self.nodes.values(), *([self.server] if self.server else [])]:
            process.process.wait(PATIENCE)

    def submit(self, config: dict, name: str) -> Path:
        """Submit a config, and return the run directory."""
        path = self.home / f"{name}.yaml"
        path.write_text(yaml.safe_dump(config))
        out = self.home / f"run-{name}"
        perdure(
            "federation",
            "submit",
            str(path),
            "--server",
            str(self.home / "server"),
            "--out",
            str(out),
        )
        return out

    def run(self, config: dict, name: str) -> dict:
        """Submit a config, wait for its end, and return its result."""
        return self.result(self.submit(config, name))

    def result(self, out: Path) -> dict:
        wait_for((out / "result.json").is_file, f"{out}/result.json", self.server)
        return json.loads((out / "result.json").read_text())

    def node_log(self, number: int) -> str:
        return (self.home / f"node-{number}" / "log" / "node.log").read_text(errors="replace")

    def server_log(self) -> str:
        """Return the log of the loop in all runs so far."""
        logs = sorted((self.home / "server" / "submissions").glob("*/log.txt"))
        return "".join(log.read_text(errors="replace") for log in logs)


def perdure(*arguments: str) -> str:
    """Run a command, and return its output."""
    done = subprocess.run(
        [PERDURE, *arguments], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def wait_for(condition, what: str, alive: Process | None = None) -> None:
    """Wait until a condition holds, while a process lives."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"waited too long for {what}"
        if alive is not None:
            assert alive.process.poll() is None, f"{what}: {alive.output()[-2000:]}"
        time.sleep(0.3)


def processes_of(folder: Path) -> dict[int, str]:
    """Return id and command of the processes that were started for a folder of the test."""
    commands = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
            command = " ".join(word.decode(errors="replace") for word in words)
            environment = (entry / "environ").read_bytes() if words else b""
            is_of_folder = str(folder) in command or str(folder).encode() in environment
            if is_of_folder and ("flower-" in command or "flwr-" in command):
                commands[int(entry.name)] = command
    return {pid: command for pid, command in commands.items() if pid != os.getpid()}


def flower_processes(home: Path) -> list[str]:
    """Return the commands of Flower that run for a folder of the test."""
    return list(processes_of(home).values())


@pytest.fixture(scope="session")
def federation(tmp_path_factory):
    """A federation that is shared by tests that leave it running."""
    created = Federation(tmp_path_factory.mktemp("federation") / "home")
    created.start()
    yield created
    created.stop()
    wait_for(lambda: flower_processes(created.home) == [], "the end of all processes")


@pytest.fixture
def own_federation(tmp_path):
    """A federation for a test that kills its processes."""
    created = Federation(tmp_path / "home")
    yield created
    created.stop()
    wait_for(lambda: flower_processes(created.home) == [], "the end of all processes")
