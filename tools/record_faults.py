"""A pytest plugin for `make faults`: count kills and differences, and print them as a table.

    PYTHONPATH=tools pytest -p record_faults tests/faults

A test reports its counts as the property `faults`: section, name, engine, kills, runs, differences.
They are added to docs/measured/faults.json after every test, in place of earlier ones of this name.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

MEASURED = Path(__file__).resolve().parents[1] / "docs" / "measured" / "faults.json"
COUNTS = ("kills", "runs", "differences")
Row = dict[str, Any]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Record the counts of a test that has just ended."""
    rows = [value for name, value in report.user_properties if name == "faults"]
    if report.when == "call" and rows:
        record(rows)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the table."""
    if MEASURED.is_file():
        terminalreporter.write_line(table(json.loads(MEASURED.read_text())))


def record(rows: list[Row], path: Path = MEASURED) -> None:
    """Add counts to the file, in place of earlier ones of the same section, name and engine."""
    kept = json.loads(path.read_text()) if path.is_file() else []
    names = {_name(row) for row in rows}
    every = [row for row in kept if _name(row) not in names] + rows
    lines = ",\n".join(json.dumps(row) for row in sorted(every, key=_name))
    path.write_text(f"[\n{lines}\n]\n")


def table(rows: list[Row]) -> str:
    """Return the counts as text, with a total per section."""
    lines = [_line("", "", "", *COUNTS)]
    for section in dict.fromkeys(row["section"] for row in rows):
        found = [row for row in rows if row["section"] == section]
        lines += [_line(*_name(row), *(row[count] for count in COUNTS)) for row in found]
        totals = (sum(row[count] for row in found) for count in COUNTS)
        lines.append(_line(section, "together", "", *totals))
    return "\n".join(lines)


def _name(row: Row) -> tuple[str, str, str]:
    return row["section"], row["name"], row["engine"]


def _line(*cells: Any) -> str:
    widths = (12, 32, 8, 8, 8, 12)
    return "".join(str(cell).ljust(width) for cell, width in zip(cells, widths, strict=True))
