"""Compare the speed of two checkouts: the median ratio of seconds per row of their benchmarks.

    python tools/bench_trees.py OLD NEW [--turns 7] [--only TEXT] [--out FILE]

OLD and NEW are checkouts; each runs its benchmarks `engine` and `methods` with its `src` and this
Python, in alternating turns. A ratio is the seconds of OLD divided by the seconds of
NEW in one turn: above 1, NEW is faster. Run it on an idle machine. With `--only`, only the rows of
the engine benchmark whose name contains TEXT are measured.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

REPEATS = {"engine": 5, "methods": 12}


def measured(tree: Path, name: str, only: str | None) -> dict[str, float]:
    """Return the seconds per row of one benchmark of one checkout."""
    module = f"from {benchmarks_of(tree)} import {name}"
    selection = f"engine.TABLE = [w for w in engine.TABLE if {only!r} in w.name]; " if only else ""
    run = f"print(json.dumps({name}.main({REPEATS[name]})))"
    code = f"import json; {module}; {selection}{run}"
    paths = os.pathsep.join([str(tree / "src"), str(tree)])
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tree, env={**os.environ, "PYTHONPATH": paths},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return dict(rows(name, json.loads(done.stdout)))


def benchmarks_of(tree: Path) -> str:
    """Return the dotted name of a checkout's benchmarks, which lie where its commit put them."""
    for folder, name in (("benchmarks", "benchmarks"), ("src/perdure/benchmarks", None)):
        if (tree / folder / "__init__.py").is_file():
            return name or folder.removeprefix("src/").replace("/", ".")
    raise SystemExit(f"{tree}: holds no benchmarks")


def rows(name: str, result: dict[str, Any]) -> list[tuple[str, float]]:
    """Return the names and seconds of the rows of a benchmark result."""
    if name == "engine":
        return [
            (f"{row['work']}: {kind}", row["best_seconds"][kind])
            for row in result["rows"]
            for kind in ("serial", "vector")
        ]
    return [
        (f"{row['model']}: {kind}", seconds)
        for row in result["rows"]
        for kind, seconds in row["median_seconds_per_round"].items()
    ]


def compare(old: Path, new: Path, turns: int, only: str | None = None) -> dict[str, Any]:
    """Return the median ratio of each row over the turns, and their geometric mean."""
    ratios: dict[str, list[float]] = {}
    for turn in range(turns):
        trees = [old, new] if turn % 2 == 0 else [new, old]
        for name in ["engine"] if only else REPEATS:
            seconds = {tree: measured(tree, name, only) for tree in trees}
            for row, value in seconds[new].items():
                ratios.setdefault(row, []).append(seconds[old][row] / value)
        print(f"turn {turn + 1} of {turns}", file=sys.stderr, flush=True)
    medians = {row: round(statistics.median(values), 3) for row, values in ratios.items()}
    mean = math.exp(statistics.fmean(math.log(value) for value in medians.values()))
    return {"turns": turns, "geometric_mean": round(mean, 3), "ratios": medians}


def main() -> None:
    """Compare two checkouts, and print the ratios or write them to a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--only")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    result = compare(given.old.resolve(), given.new.resolve(), given.turns, given.only)
    text = json.dumps(result, indent=2)
    if given.out:
        given.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
