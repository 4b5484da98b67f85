"""Servers, nodes or both are killed in every task: no round is lost, the model has the same bits.

Part of `make faults` (PERDURE_KILLS), not of `make test-federation`: 48 kills, about 30 minutes.
The config asks for all nodes (`federation.quorum`), so that a round waits for one that was killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from itertools import cycle

import numpy as np
import pytest
from sklearn.datasets import load_digits

from conftest import Federation, flower_processes, processes_of, wait_for

if "PERDURE_KILLS" not in os.environ:
    pytest.skip("part of `make faults`", allow_module_level=True)

TASKS, ROUNDS, NODES = 4, 2, 3
KILLS_PER_TASK = 2
CONFIG = {
    "stream": {"kind": "domains", "tasks": TASKS},
    "clients": {"count": NODES},
    "model": {"kind": "mlp", "hidden": [16]},
    "train": {"rounds": ROUNDS, "batch_size": 16},
    "data": {"mean": [0.3], "std": [0.38]},
    "federation": {
        "classes": [str(digit) for digit in range(10)],
        "shape": [1, 8, 8],
        "quorum": NODES,
        "wait": 1800,
    },
    "engine": {"kind": "flower", "timeout": 1800},
    "device": "cpu",
}
VARIANTS = {
    "fedavg": {"method": {"kind": "fedavg"}},
    "er": {"method": {"kind": "er"}},
    "secure sums": {"method": {"kind": "fedavg"}, "privacy": {"secagg": True}},
}
CHANGING = ("seconds", "peak_rss_mb")
"""Keys of a result that no two runs share."""


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    """A federation whose nodes hold data of four tasks."""
    folder = tmp_path_factory.mktemp("kills")
    write_data(folder / "data")
    created = Federation(folder / "home", folder / "data")
    created.start()
    yield created
    created.stop()
    wait_for(lambda: flower_processes(created.home) == [], "the end of all processes")


def write_data(folder):
    """Write digits for every node and task; those of task t are turned by t quarters."""
    bundled = load_digits()
    images = np.rint(bundled.images * (255 / 16)).astype(np.uint8)
    for node in range(NODES):
        (folder / f"node-{node}").mkdir(parents=True)
        train, test = slice(node, 240, NODES), slice(1200 + node, 1320, NODES)
        for task in range(TASKS):
            x = np.ascontiguousarray(np.rot90(images, task, (1, 2)))
            np.savez(
                folder / f"node-{node}" / f"task-{task + 1}.npz",
                x_train=x[train], y_train=bundled.target[train],
                x_test=x[test], y_test=bundled.target[test],
            )  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(federation):
    """The result of a variant without kills, computed once."""
    found = {}

    def result(name):
        if name not in found:
            found[name] = federation.run({**CONFIG, **VARIANTS[name]}, f"whole-{name}")
        return found[name]

    return result


@pytest.mark.parametrize("number", range(2 * len(VARIANTS)))
def test_kills_in_every_task_lose_nothing(number, federation, undisturbed, record_property):
    name = list(VARIANTS)[number % len(VARIANTS)]
    expected = undisturbed(name)
    out = federation.submit({**CONFIG, **VARIANTS[name]}, f"killed-{number}")
    kills = kill_in_every_task(federation, out, random.Random(number), number)
    got = federation.result(out)
    differs = comparable(got) != comparable(expected)
    record_property(
        "faults",
        {
            "section": "federations", "name": f"{name} {number // len(VARIANTS) + 1}",
            "engine": "flower", "kills": kills, "runs": 1, "differences": int(differs),
        },
    )  # fmt: skip
    assert kills == KILLS_PER_TASK * TASKS
    assert [(e["task"], e["round"]) for e in events(out) if e["event"] == "round"] == [
        (task, number) for task in range(TASKS) for number in range(ROUNDS)
    ]
    assert got["client_updates"] == NODES * ROUNDS * TASKS
    assert comparable(got) == comparable(expected)


def kill_in_every_task(federation, out, draw, first):
    """Kill server, node or both at random moments of every task, and return how often."""
    targets, kills = cycle(("server", "node", "both")), 0
    for _ in range(first):
        next(targets)
    for task in range(TASKS):
        for after in sorted(draw.sample(range(ROUNDS + 1), KILLS_PER_TASK)):
            wait_for_events(federation, out, (ROUNDS + 1) * task + after)
            time.sleep(draw.uniform(0, 3))
            if (out / "result.json").is_file():
                return kills
            strike(federation, next(targets), draw.randrange(NODES))
            kills += 1
    return kills


def wait_for_events(federation, out, count):
    wait_for(lambda: len(events(out)) >= count, f"{count} events", federation.server)


def events(out):
    path = out / "events.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.is_file() else []
    return [json.loads(line) for line in lines]


def strike(federation, target, node):
    """Kill all processes of the server, of a node or of both, as a power cut does, and restart."""
    if target in ("server", "both"):
        kill_server(federation)
    if target in ("node", "both"):
        federation.kill_node(node)
        federation.start_node(node)
    if target in ("server", "both"):
        (federation.home / "server.out").unlink()
        federation.start_server()


def kill_server(federation):
    folder = federation.home / "server"
    for process in processes_of(folder):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    federation.server.stop(signal.SIGKILL)
    wait_for(lambda: not processes_of(folder), "the end of what the server had started")


def comparable(result):
    return {key: value for key, value in result.items() if key not in CHANGING}
