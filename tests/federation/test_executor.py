"""A node's executor: forks serve requests, and the executor ends with the node."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("flwr")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks are used on Linux only")

SERVE = """
import os, subprocess, sys, time
from pathlib import Path
from flwr.supercore.superexec.executor import ExecutionSpec
from flwr.supernode.runtime import run_clientapp
from perdure.federation.node.executor import ForkExecutor

owner = os.getpid()
reading, writing = os.pipe()
node = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
executor = ForkExecutor(node, Path("."))

def report(text):
    os.write(1, (text + "\\n").encode())  # in one piece: forks write to the same pipe

def served(**given):
    report(given["token"] + (" in a fork" if os.getpid() != owner else " in the executor"))
    executor.close()  # what Flower calls when a process ends
    ENDING

run_clientapp.run_clientapp = served
for number in (1, 2):
    spec = ExecutionSpec("flwr-clientapp", "127.0.0.1:1", f"request-{number}", True, None, False,
                         owner, False, number)
    report(executor.launch(spec).status.value)
os.close(writing)
os.read(reading, 1)  # nothing, when no fork is left
os.kill(node.pid, 0)
report("the node is alive")
executor.close()
time.sleep(100)
"""


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize(
    "ending",
    [
        "sys.exit('a reason')",
        pytest.param("sys.exit(0)", marks=pytest.mark.slow),
        pytest.param("raise ValueError('x')", marks=pytest.mark.slow),
    ],
)
def test_forks_serve_and_leave_executor_and_node_alone(ending):
    done = python("-c", SERVE.replace("ENDING", ending))
    said = sorted(done.stdout.splitlines())
    assert said == [
        "accepted",
        "accepted",
        "request-1 in a fork",
        "request-2 in a fork",
        "the node is alive",
    ], done.stderr
    assert ("ValueError: x" in done.stderr) == ("ValueError" in ending)
    assert done.returncode == 15, "closed by the executor's own, it ends with the node"


def test_the_executor_ends_with_the_node_and_its_exit_code():
    node = [sys.executable, "-c", "raise SystemExit(7)"]
    assert python("-m", "perdure.federation.node.executor", "1", ".", *node).returncode == 7


def test_flower_has_the_functions_that_are_replaced():
    from flwr.supercore.superexec import run_superexec
    from flwr.supercore.superexec.executor import Executor
    from flwr.supernode.runtime import run_clientapp

    from perdure.federation.node.executor import ForkExecutor

    assert callable(run_superexec.get_executor)
    assert callable(run_clientapp.install_from_fab)
    asked = {name for name in vars(Executor) if not name.startswith("_")}
    assert asked <= set(vars(ForkExecutor))
