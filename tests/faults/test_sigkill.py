"""SIGKILL at random moments, resume, and the result is bit for bit that of an undisturbed run."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

MOMENTS = 5
"""Kills for each of the four pairs of method and engine: twenty in all."""

if not hasattr(signal, "SIGKILL"):
    pytest.skip("this platform has no SIGKILL", allow_module_level=True)

COMMAND = [sys.executable, "-c", "from perdure.cli.main import main; main()", "run"]


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


def finish(config: Path, out: Path, resume: bool) -> None:
    flag = ["--resume"] if resume else []
    subprocess.run(
        [*COMMAND, str(config), "--out", str(out), "--quiet", *flag],
        check=True, capture_output=True, timeout=300,
    )  # fmt: skip


def kill_after(config: Path, out: Path, lines: int, seconds: float, resume: bool) -> None:
    """Start the run, wait for so many lines of events, then a little longer, then SIGKILL."""
    flag = ["--resume"] if resume else []
    process = subprocess.Popen(
        [*COMMAND, str(config), "--out", str(out), "--quiet", *flag],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    events = out / "events.jsonl"
    while process.poll() is None:
        if events.is_file() and events.read_bytes().count(b"\n") >= lines:
            break
        time.sleep(0.002)
    time.sleep(seconds)
    process.kill()
    process.wait()


@pytest.mark.parametrize("engine", ["serial", "vector"])
@pytest.mark.parametrize("method", [{"kind": "fedavg"}, {"kind": "fedprox", "mu": 0.1}], ids=str)
def test_killed_runs_end_alike(tmp_path: Path, method: dict[str, Any], engine: str) -> None:
    config = write_config(tmp_path, method, engine)
    finish(config, tmp_path / "whole", resume=False)
    expected = outcome(tmp_path / "whole")
    moments = random.Random(f"{method}{engine}")
    out, total = tmp_path / "killed", 3 * (8 + 1)
    lines = sorted(moments.sample(range(total), MOMENTS))
    for number, line in enumerate(lines):
        kill_after(config, out, line, moments.uniform(0, 0.02), resume=number > 0 and _begun(out))
    finish(config, out, resume=_begun(out))
    assert outcome(out) == expected
    assert events(out) == events(tmp_path / "whole")


def _begun(out: Path) -> bool:
    return (out / "config.yaml").is_file()


def events(run: Path) -> list[Any]:
    return [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
