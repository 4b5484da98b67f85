"""A served run, as a real process that is asked over HTTP."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

DIGITS = np.rint(load_digits().images[:40] * (255 / 16)).astype(np.uint8)
VALUES: dict[str, Any] = {
    "data": {"source": "digits", "limit": 300},
    "stream": {"kind": "split", "tasks": 2, "classes_per_task": 3},
    "clients": {"count": 3},
    "model": {"kind": "mlp", "hidden": [16]},
    "method": {"kind": "fedprotip"},
    "train": {"rounds": 2, "batch_size": 16},
    "engine": {"kind": "serial"},
}


@contextmanager
def served(run: Path, *words: str) -> Iterator[str]:
    """Start `perdure serve` on a free port, and yield its address."""
    command = [sys.executable, "-m", "perdure", "serve", str(run), "--port", "0", *words]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert " at http://127.0.0.1:" in line, line
        yield line.split(" at ")[1].split()[0]
    finally:
        process.terminate()
        assert process.wait(30) in (0, -15)
        process.stdout.close()
