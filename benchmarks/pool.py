"""A pool of 10,000 clients against a pool of 10: peak memory and seconds per round.

    python -m benchmarks pool --out pool.json

Both train 10 clients per round, 10 steps each, on 60,000 random images of 28x28 pixels: neither
memory nor time depends on their content. Each pool runs in a separate process.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

SMALL, LARGE = 10, 10_000
ROUNDS, STEPS, BATCH = 60, 10, 6
BOUNDS = {"extra_mb": 200.0, "seconds_ratio": 1.1}


def write_images(path: Path) -> None:
    """Write an npz file of MNIST's size."""
    rng = np.random.default_rng(0)
    np.savez(
        path,
        x_train=rng.integers(0, 256, (60_000, 28, 28), dtype=np.uint8),
        y_train=rng.integers(0, 10, 60_000),
        x_test=rng.integers(0, 256, (1_000, 28, 28), dtype=np.uint8),
        y_test=rng.integers(0, 10, 1_000),
    )


def config(images: str, clients: int) -> dict[str, Any]:
    """Return the config of equal work for any number of clients: 10 per round, STEPS steps each."""
    return {
        "data": {"source": "npz", "path": images},
        "stream": {"kind": "permuted", "tasks": 1},
        "clients": {"count": clients, "per_round": 10},
        "train": {
            "rounds": ROUNDS, "batch_size": BATCH, "local_epochs": STEPS, "max_steps": STEPS,
        },
        "engine": {"kind": "vector", "chunk": 10},
    }  # fmt: skip


def one_pool(images: str, clients: int, out: str) -> dict[str, float]:
    """Run one pool in this process."""
    import perdure

    stamps = [time.perf_counter()]
    result = perdure.run(
        config(images, clients), out=out, watch=lambda *_: stamps.append(time.perf_counter())
    )
    rounds = [b - a for a, b in pairwise(stamps[5:-1])]
    return {"peak_mb": result.values["peak_rss_mb"], "seconds": statistics.median(rounds)}


def in_process(images: Path, clients: int, folder: Path) -> dict[str, float]:
    """Run one pool in a separate process; return its peak memory and seconds per round."""
    command = [sys.executable, "-m", __spec__.name, str(images), str(clients), str(folder)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(repeats: int = 3) -> dict[str, Any]:
    """Both pools in turns."""
    runs: dict[int, list[dict[str, float]]] = {SMALL: [], LARGE: []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_images(folder / "images.npz")
        for turn in range(repeats):
            for clients, found in runs.items():
                out = folder / f"{clients}-{turn}"
                found.append(in_process(folder / "images.npz", clients, out))
    peak = {n: min(run["peak_mb"] for run in found) for n, found in runs.items()}
    seconds = {n: min(run["seconds"] for run in found) for n, found in runs.items()}
    extra, ratio = peak[LARGE] - peak[SMALL], seconds[LARGE] / seconds[SMALL]
    return {
        "benchmark": "pool",
        "statistic": f"best of {repeats} processes; seconds: each one's median round",
        "peak_mb": peak,
        "seconds_per_round": seconds,
        "extra_mb": round(extra, 1),
        "seconds_ratio": round(ratio, 3),
        "bounds": BOUNDS,
        "met": bool(extra <= BOUNDS["extra_mb"] and ratio <= BOUNDS["seconds_ratio"]),
    }


if __name__ == "__main__":
    print(json.dumps(one_pool(sys.argv[1], int(sys.argv[2]), sys.argv[3])))
