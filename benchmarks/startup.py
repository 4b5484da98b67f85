"""Seconds of `import perdure` and of `perdure --help`, against another version and an interpreter.

    PERDURE_BASE=OTHER/src python -m benchmarks startup --out FILE

The import is counted without torch: the sum of the times that `python -X importtime` gives to each
module, without torch and what torch imports. PERDURE_BASE names the `src` folder of the version to
compare with, such as that of a `git worktree`. By default only this version is measured.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

RUNS = 9
HERE = Path(__file__).resolve().parents[1] / "src"


def main() -> dict[str, Any]:
    """Measure all versions in turns, and return medians and their ratios."""
    base = os.environ.get("PERDURE_BASE")
    sources = {"this": HERE, **({"base": Path(base)} if base else {})}
    imports: dict[str, list[float]] = {name: [] for name in sources}
    helps: dict[str, list[float]] = {name: [] for name in (*sources, "interpreter")}
    for _ in range(RUNS):
        helps["interpreter"].append(seconds(HERE, "-c", "pass"))
        for name, source in sources.items():
            imports[name].append(import_seconds(source))
            helps[name].append(seconds(source, "-m", "perdure", "--help"))
    imported = {name: median(values) for name, values in imports.items()}
    helped = {name: median(values) for name, values in helps.items()}
    figures: dict[str, Any] = {
        "runs": RUNS,
        "import_seconds_without_torch": imported,
        "help_seconds": helped,
        "help_seconds_beside_an_interpreter": helped["this"] - helped["interpreter"],
    }
    if base:
        figures["import_ratio"] = imported["this"] / imported["base"]
    return figures


def seconds(source: Path, *words: str) -> float:
    """Return the wall-clock time of a process of Python."""
    start = time.perf_counter()
    python(source, *words)
    return time.perf_counter() - start


def import_seconds(source: Path) -> float:
    """Return the time of `import perdure` without that of torch and what torch imports."""
    lines = python(source, "-X", "importtime", "-c", "import perdure").splitlines()
    entries = [line.removeprefix("import time:").split("|") for line in lines if "|" in line][1:]
    total, torch_depth = 0.0, None
    for own, _, name in reversed(entries):  # a module is listed after what it imports
        depth = len(name) - len(name.lstrip())
        if torch_depth is not None and depth > torch_depth:
            continue
        torch_depth = depth if name.strip() == "torch" else None
        total += 0 if torch_depth is not None else int(own) / 1e6
    return total


def python(source: Path, *words: str) -> str:
    """Run a process of Python that finds a version of the library, and return its messages."""
    environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return done.stderr
