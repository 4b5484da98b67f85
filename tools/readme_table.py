"""Run `perdure demo` and put its tables into the README, between <!-- demo --> and <!-- /demo -->.

python tools/readme_table.py
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

from perdure.cli.demo import MODE, plan, prompted
from perdure.comparison.compare import finished_groups, run_plan
from perdure.comparison.plan import PlannedRun
from perdure.report.comparison_text import format_bytes

README = Path(__file__).resolve().parents[1] / "README.md"
SHOWN = ("ACC", "FGT", "AF", "Avg")
Results = dict[str, dict[str, Any]]


def markdown(permuted: Results, split: Results) -> str:
    """The metrics of the demo's two parts as tables, and the first run's matrix between them."""
    return "\n".join([*_metrics(permuted), "", *_matrix(*next(iter(permuted.items()))), "",
                      "Split digits, the prompt methods:", "", *_metrics(split)])  # fmt: skip


def _metrics(runs: Results) -> list[str]:
    return [
        f"| method | {' | '.join(SHOWN)} | sent up |",
        "|---" * (len(SHOWN) + 2) + "|",
        *(_row(kind, result) for kind, result in runs.items()),
    ]


def _row(kind: str, result: dict[str, Any]) -> str:
    found = result["metrics"][MODE]
    numbers = " | ".join(f"{found[name]:.3f}" for name in SHOWN)
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
    """The results of a part of the demo by method."""
    with tempfile.TemporaryDirectory() as folder:
        run_plan(planned, Path(folder))
        groups = finished_groups(planned, Path(folder))
        return {kind: group[0].result for kind, group in groups.items()}


def main() -> None:
    """Run every method of the demo and rewrite the README's part."""
    text = README.read_text(encoding="utf-8")
    part = f"<!-- demo -->\n{markdown(results(plan()), results(prompted()))}\n<!-- /demo -->"
    new, count = re.subn(r"<!-- demo -->.*<!-- /demo -->", lambda _: part, text, flags=re.DOTALL)
    if count != 1:
        raise SystemExit(f"{README}: needs one <!-- demo --> ... <!-- /demo --> part, has {count}")
    README.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
