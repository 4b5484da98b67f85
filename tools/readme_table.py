"""Run `perdure demo` and write its tables into the README and into docs/report.md.

Each table stands between two comments, such as <!-- demo --> and <!-- /demo -->.

python tools/readme_table.py
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

from perdure.cli.demo import MODE, permuted_runs, split_runs
from perdure.comparison.compare import finished_groups, run_plan
from perdure.comparison.plan import PlannedRun
from perdure.report.comparison_text import format_bytes

ROOT = Path(__file__).resolve().parents[1]
SHOWN = ("ACC", "FGT", "AF", "Avg")
Results = dict[str, dict[str, Any]]


def tables(permuted: Results, split: Results) -> dict[tuple[str, str], list[str]]:
    """Return the lines of each table by its file and the name of its comments."""
    return {
        ("README.md", "demo"): _metrics(permuted),
        ("docs/report.md", "demo matrix"): _matrix(*next(iter(permuted.items()))),
        ("docs/report.md", "demo split"): _metrics(split),
    }


def with_table(text: str, name: str, lines: list[str]) -> str:
    """Return `text` with the table between the comments `name` replaced."""
    part = "\n".join([f"<!-- {name} -->", "", *lines, "", f"<!-- /{name} -->"])
    pattern = rf"<!-- {name} -->.*<!-- /{name} -->"
    new, count = re.subn(pattern, lambda _: part, text, flags=re.DOTALL)
    if count != 1:
        raise SystemExit(f"needs one <!-- {name} --> ... <!-- /{name} --> part, has {count}")
    return new


def _metrics(runs: Results) -> list[str]:
    return [
        f"| method | {' | '.join(SHOWN)} | sent up |",
        "|---" * (len(SHOWN) + 2) + "|",
        *(_row(kind, result) for kind, result in runs.items()),
    ]


def _row(kind: str, result: dict[str, Any]) -> str:
    metrics = result["metrics"][MODE]
    numbers = " | ".join(f"{metrics[name]:.3f}" for name in SHOWN)
    return f"| {kind} | {numbers} | {format_bytes(result['bytes']['up'])} |"


def _matrix(kind: str, result: dict[str, Any]) -> list[str]:
    matrix = result["matrix"][MODE]
    names = [f"task {j + 1}" for j in range(len(matrix))]
    rows = [
        f"| after {name} | " + " | ".join("" if v is None else f"{v:.3f}" for v in row) + " |"
        for name, row in zip(names, matrix, strict=True)
    ]
    return [f"| {kind} | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|", *rows]


def results(planned: list[PlannedRun]) -> Results:
    """Return the results of a part of the demo by method."""
    with tempfile.TemporaryDirectory() as folder:
        run_plan(planned, Path(folder))
        groups = finished_groups(planned, Path(folder))
        return {kind: group[0].result for kind, group in groups.items()}


def main() -> None:
    """Run every method of the demo and rewrite the tables."""
    for (file, name), lines in tables(results(permuted_runs()), results(split_runs())).items():
        path = ROOT / file
        path.write_text(with_table(path.read_text(encoding="utf-8"), name, lines), encoding="utf-8")


if __name__ == "__main__":
    main()
