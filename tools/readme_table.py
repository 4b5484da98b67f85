"""Run `perdure demo` and put its table into the README, between <!-- demo --> and <!-- /demo -->.

python tools/readme_table.py
"""

from __future__ import annotations

import re
from pathlib import Path

from perdure.cli.demo import MODE, configs, one
from perdure.cli.tables import size
from perdure.runs.runner import Result

README = Path(__file__).resolve().parents[1] / "README.md"
SHOWN = ("ACC", "FGT", "AF", "Avg")


def markdown(runs: dict[str, Result]) -> str:
    """The demo's metrics as a table, and the first run's matrix."""
    lines = [
        f"| method | {' | '.join(SHOWN)} | sent up |",
        "|---" * (len(SHOWN) + 2) + "|",
        *(_row(kind, result) for kind, result in runs.items()),
        "",
        *_matrix(*next(iter(runs.items()))),
    ]
    return "\n".join(lines)


def _row(kind: str, result: Result) -> str:
    found = result.metrics[MODE]
    numbers = " | ".join(f"{found[name]:.3f}" for name in SHOWN)
    return f"| {kind} | {numbers} | {size(result.values['bytes']['up'])} |"


def _matrix(kind: str, result: Result) -> list[str]:
    matrix = result.matrix[MODE]
    names = [f"task {j + 1}" for j in range(len(matrix))]
    rows = [
        f"| after {name} | " + " | ".join("" if v is None else f"{v:.3f}" for v in row) + " |"
        for name, row in zip(names, matrix, strict=True)
    ]
    return [f"| {kind} | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|", *rows]


def main() -> None:
    """Run every method of the demo and rewrite the README's part."""
    runs = {config.method["kind"]: one(config, None, True, None) for config in configs()}
    text = README.read_text(encoding="utf-8")
    part = f"<!-- demo -->\n{markdown(runs)}\n<!-- /demo -->"
    new, count = re.subn(r"<!-- demo -->.*<!-- /demo -->", lambda _: part, text, flags=re.DOTALL)
    if count != 1:
        raise SystemExit(f"{README}: needs one <!-- demo --> ... <!-- /demo --> part, has {count}")
    README.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
