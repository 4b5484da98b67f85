"""SIGKILL at random moments, resume, and the result is bit for bit that of an undisturbed run."""

from __future__ import annotations

import json
import multiprocessing
import random
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import yaml

import perdure

MOMENTS = 5
"""Kills per pair of method and engine, of which there are four."""

if not hasattr(signal, "SIGKILL"):
    pytest.skip("this platform has no SIGKILL", allow_module_level=True)

# children begin with everything imported, so that a kill costs no start of Python
processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(
    ["perdure", "sklearn.datasets", "torch.fx.experimental.proxy_tensor"]
)


def write_config(folder: Path, method: dict[str, Any], engine: str) -> Path:
    values = {
        "data": {"limit": 300},
        "stream": {"kind": "split", "tasks": 3, "classes_per_task": 3},
        "clients": {"count": 6, "per_round": 4, "partition": {"kind": "dirichlet"}},
        "model": {"hidden": [16]},
        "method": method,
        "train": {"rounds": 8, "batch_size": 16, "momentum": 0.5},
        "engine": {"kind": engine},
        "runs": {"evaluate_every": 4},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def outcome(run: Path) -> dict[str, Any]:
    result = json.loads((run / "result.json").read_text())
    for changing in ("seconds", "peak_rss_mb"):
        del result[changing]
    return result


def start(config: Path, out: Path) -> BaseProcess:
    """Run or resume in a separate process."""
    has_run = (out / "config.yaml").is_file()
    process = processes.Process(target=perdure.run, args=(config, out, has_run))
    process.start()
    return process


def finish(config: Path, out: Path) -> None:
    process = start(config, out)
    process.join()
    assert process.exitcode == 0


def kill_after(config: Path, out: Path, lines: int, seconds: float) -> None:
    """Start the run, wait for so many lines of events, then a little longer, then SIGKILL."""
    process, events = start(config, out), out / "events.jsonl"
    while process.is_alive():
        if events.is_file() and events.read_bytes().count(b"\n") >= lines:
            break
        time.sleep(0.002)
    time.sleep(seconds)
    process.kill()
    process.join()


@pytest.mark.parametrize("engine", ["serial", "vector"])
@pytest.mark.parametrize("method", [{"kind": "fedavg"}, {"kind": "fedprox", "mu": 0.1}], ids=str)
def test_a_killed_run_that_is_resumed_ends_alike(
    tmp_path: Path, method: dict[str, Any], engine: str
) -> None:
    config = write_config(tmp_path, method, engine)
    finish(config, tmp_path / "whole")
    moments = random.Random(f"{method}{engine}")
    out, total = tmp_path / "killed", 3 * (8 + 1)
    for line in sorted(moments.sample(range(total), MOMENTS)):
        kill_after(config, out, line, moments.uniform(0, 0.02))
    finish(config, out)
    assert outcome(out) == outcome(tmp_path / "whole")
    assert events(out) == events(tmp_path / "whole")


def events(run: Path) -> list[Any]:
    return [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
