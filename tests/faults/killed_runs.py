"""Runs in separate processes that die by SIGKILL, are resumed, and are compared with whole ones.

A process dies at a random moment (`Moment.seconds` after so many events), or immediately before
one of its operations on files (`Moment.operations` after so many events), so that kills also hit
checkpoints, exports, the result and the report.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import yaml

import perdure
from perdure.core.files import sha256, sha256_file
from perdure.core.trees import encode
from perdure.runs.checkpoint import number_of, paths, read

if not hasattr(signal, "SIGKILL"):
    pytest.skip("this platform has no SIGKILL", allow_module_level=True)

KILLS_PER_RUN = 5
MAX_OPERATIONS = 24
"""Largest number of file operations between an event and a kill; a round has about ten."""
OPERATIONS = ("open", "os.mkdir", "os.link", "os.remove", "os.rename", "os.truncate")
CHANGING = ("seconds", "peak_rss_mb", "task_end_seconds")
"""Keys of a result and of a checkpoint's state that no two runs share."""

# children begin with everything imported, so that a kill costs no start of Python
processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(
    [
        "perdure.runs.run", "perdure.training.engines.vector", "perdure.runs.tracking",
        "sklearn.datasets", "sympy", "torch._dynamo", "torch.fx.experimental.proxy_tensor",
    ]
)  # fmt: skip


@dataclass(frozen=True)
class Moment:
    """When a process is killed."""

    events: int
    """Lines of events.jsonl that are there first."""
    seconds: float = 0.0
    """Seconds that pass then."""
    operations: int | None = None
    """Operations on files of the run that are done then. If None, only time counts."""


@dataclass
class Campaign:
    """Kills of the runs of one config."""

    config: Path
    folder: Path
    """Where the runs are written."""
    kills: int = 0
    """Processes that were killed."""
    runs: int = 0
    """Runs that were killed and then finished."""
    differences: int = 0
    """Runs that differ from a run that was not killed."""

    @property
    def counts(self) -> dict[str, int]:
        return {"kills": self.kills, "runs": self.runs, "differences": self.differences}

    def kill(self, kills: int) -> None:
        """Kill so many processes; every run is finished and compared."""
        draw = random.Random(f"{self.config.read_text()}")
        whole = self.folder / "whole"
        start = time.perf_counter()
        finish(self.config, whole)
        expected, seconds = outcome(whole), time.perf_counter() - start
        while self.kills < kills:
            run, total = self.folder / f"killed {self.runs}", len(expected["events"])
            count = min(KILLS_PER_RUN, kills - self.kills)
            for moment in moments(draw, total, count, 2 * seconds / total):
                self.kills += kill_at(self.config, run, moment)
            finish(self.config, run)
            self.runs += 1
            self.differences += outcome(run) != expected


def moments(draw: random.Random, events: int, count: int, pause: float) -> Iterator[Moment]:
    """Yield moments of one run, one after the other.

    Args:
        draw: Where they are drawn from.
        events: Number of events of a whole run.
        count: Number of moments.
        pause: Largest number of seconds after an event.
    """
    for line in sorted(draw.choices(range(events + 1), k=count)):
        if draw.random() < 0.5:
            yield Moment(line, seconds=draw.uniform(0, pause))
        else:
            yield Moment(line, operations=draw.randrange(MAX_OPERATIONS))


def kill_at(config: Path, run: Path, moment: Moment) -> bool:
    """Start or resume a run, and return whether it was killed before its end."""
    process, events = start_process(config, run, moment), run / "events.jsonl"
    while process.is_alive() and (moment.operations is not None or lines(events) < moment.events):
        time.sleep(0.002)
    if moment.operations is None:
        time.sleep(moment.seconds)
        process.kill()
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL), f"{run} failed after a kill"
    return process.exitcode != 0


def finish(config: Path, run: Path) -> None:
    process = start_process(config, run)
    process.join()
    assert process.exitcode == 0, f"{run} cannot be finished"


def start_process(config: Path, run: Path, moment: Moment | None = None) -> BaseProcess:
    """Run or resume in a separate process, which may kill itself."""
    process = processes.Process(target=work, args=(config, run, moment))
    process.start()
    return process


def work(config: Path, run: Path, moment: Moment | None) -> None:
    if moment is not None and moment.operations is not None:
        die_before_operation(run, moment)
    perdure.run(config, run, resume=(run / "config.yaml").is_file())


def die_before_operation(run: Path, moment: Moment) -> None:
    """Let this process kill itself at its n-th file operation in the run after some events."""
    left, counting = moment.operations, False

    def watch(operation: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left, counting
        if counting or operation not in OPERATIONS or str(run) not in str(arguments[0]):
            return
        counting = True  # the events are read, which is an operation too
        if lines(run / "events.jsonl") >= moment.events:
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1
        counting = False

    sys.addaudithook(watch)


def lines(events: Path) -> int:
    return events.read_bytes().count(b"\n") if events.is_file() else 0


def outcome(run: Path) -> dict[str, Any]:
    """Return everything that a run leaves, but times."""
    result = json.loads((run / "result.json").read_text())
    card = json.loads((run / "model/card.json").read_text())
    clients = run / "clients"
    return {
        "result": {key: value for key, value in result.items() if key not in CHANGING},
        "events": [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()],
        "card": card["sha256"],
        "weights": sha256_file(run / "model/model.safetensors"),
        "clients": sorted(os.listdir(clients)) if clients.is_dir() else [],
        "checkpoints": stored(run / "checkpoints"),
        "checkpoints of tasks": stored(run / "checkpoints/tasks"),
        "files": sorted(path.name for path in run.iterdir()),
    }


def stored(folder: Path) -> list[tuple[int, str]]:
    """Return number and content of all checkpoints, with the names of the client states."""
    found = []
    for path in paths(folder):
        tree = read(path)
        state = {key: value for key, value in tree["state"].items() if key not in CHANGING}
        content = encode({"state": state, "clients": tree["clients"]})
        found.append((number_of(path), sha256(content)))
    return found


def write_config(folder: Path, values: dict[str, Any]) -> Path:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(values))
    return path
