"""Run `perdure demo` and write its tables into the README and into docs/report.md.

Each table stands between two comments, such as <!-- demo --> and <!-- /demo -->.

python tools/readme_table.py
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

from perdure.cli.demo import MODE, PERMUTED, PROMPTS, SPLIT, DemoPart
from perdure.report.comparison import DIVIDER
from perdure.report.records import RunRecord
from perdure.report.tables import format_bytes
from perdure.runs.compare.compare import finished_groups, run_plan

ROOT = Path(__file__).resolve().parents[1]
SHOWN = ("ACC", "learned", "FGT", "Avg")
TARGETS = (
    ("README.md", "demo", PERMUTED),
    ("docs/report.md", "demo split", SPLIT),
    ("docs/report.md", "demo prompts", PROMPTS),
)
"""File and name of the comments of each table of metrics."""
Records = dict[str, RunRecord]


def tables(parts: dict[str, Records]) -> dict[tuple[str, str], list[str]]:
    """Return the lines of each table by its file and the name of its comments.

    Args:
        parts: The finished runs by label, of each part of the demo.

    """
    first = next(iter(parts[PERMUTED.name].items()))
    metrics = {(file, name): _metrics(parts[part.name]) for file, name, part in TARGETS}
    return metrics | {("docs/report.md", "demo matrix"): _matrix(*first)}


def with_table(text: str, name: str, lines: list[str]) -> str:
    """Return `text` with the table between the comments `name` replaced."""
    part = "\n".join([f"<!-- {name} -->", "", *lines, "", f"<!-- /{name} -->"])
    pattern = rf"<!-- {name} -->.*<!-- /{name} -->"
    new, count = re.subn(pattern, lambda _: part, text, flags=re.DOTALL)
    if count != 1:
        raise SystemExit(f"needs one <!-- {name} --> ... <!-- /{name} --> part, has {count}")
    return new


def _metrics(runs: Records) -> list[str]:
    methods = [_row(label, run.result) for label, run in runs.items() if not run.is_reference]
    references = [_row(label, run.result) for label, run in runs.items() if run.is_reference]
    divider = f"| *{DIVIDER}* |" + " |" * (len(SHOWN) + 1)
    return [
        f"| method | {' | '.join(SHOWN)} | sent up |",
        "|---" * (len(SHOWN) + 2) + "|",
        *methods,
        *([divider, *references] if references else []),
    ]


def _row(label: str, result: dict[str, Any]) -> str:
    metrics = result["metrics"][MODE]
    numbers = " | ".join(f"{metrics[name]:.3f}" for name in SHOWN)
    return f"| {label} | {numbers} | {format_bytes(result['bytes']['up'])} |"


def _matrix(label: str, run: RunRecord) -> list[str]:
    matrix = run.result["matrix"][MODE]
    names = [f"task {j + 1}" for j in range(len(matrix))]
    rows = [
        f"| after {name} | " + " | ".join("" if v is None else f"{v:.3f}" for v in row) + " |"
        for name, row in zip(names, matrix, strict=True)
    ]
    return [f"| {label} | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|", *rows]


def finished(part: DemoPart) -> Records:
    """Run a part of the demo and return its runs by label."""
    with tempfile.TemporaryDirectory() as folder:
        planned = part.runs()
        run_plan(planned, Path(folder))
        groups = finished_groups(planned, Path(folder))
        return {label: group[0] for label, group in groups.items()}


def main() -> None:
    """Run every part of the demo and rewrite the tables."""
    parts = {part.name: finished(part) for _, _, part in TARGETS}
    for (file, name), lines in tables(parts).items():
        path = ROOT / file
        path.write_text(with_table(path.read_text(encoding="utf-8"), name, lines), encoding="utf-8")


if __name__ == "__main__":
    main()
