"""A pytest plugin for `make faults` and `make fuzz`: count what campaigns found, as a table.

    PYTHONPATH=. pytest -p tools.record_campaigns tests/faults

A test reports its counts as the property `faults` or `fuzz`. They are added to the results file of
this name in docs/measured after every test, in place of earlier ones of the same test and of all
that other code has left.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tools.results import MEASURED, kept_results, write_results

Row = dict[str, Any]


@dataclass(frozen=True)
class Campaign:
    """What the rows of a results file hold."""

    names: tuple[str, ...]
    """Keys that identify a row; the first one groups rows."""
    counts: tuple[str, ...]

    def name_of(self, row: Row) -> tuple[str, ...]:
        """Return what identifies a row."""
        return tuple(str(row[key]) for key in self.names)

    def total(self, rows: list[Row]) -> list[int]:
        """Return the counts of several rows together; memory is that of the largest."""
        every = {key: [int(row[key]) for row in rows] for key in self.counts}
        return [max(each) if key == "mb" else sum(each) for key, each in every.items()]


CAMPAIGNS = {
    "faults": Campaign(("section", "name", "engine"), ("kills", "runs", "differences")),
    "fuzz": Campaign(("kind",), ("messages", "refused", "surprises", "mb")),
}
"""By the property's name. A surprise is another exception than the documented ones; mb is by how
much the process has grown."""


_recorded: set[str] = set()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Record the counts of a test that has just ended, those of its fixtures included."""
    if "PYTEST_XDIST_WORKER" in os.environ:  # its reports go to the process that writes
        return
    for name in CAMPAIGNS:
        rows = [value for key, value in report.user_properties if key == name]
        if report.when == "teardown" and rows:
            record(name, rows)
            _recorded.add(name)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the tables to which this session has added."""
    for name in sorted(_recorded):
        terminalreporter.write_line(table(name))


def record(name: str, rows: list[Row], folder: Path = MEASURED) -> None:
    """Add counts to a results file, in place of earlier ones of the same tests."""
    path, campaign = folder / f"{name}.json", CAMPAIGNS[name]
    kept = kept_results(path).get("rows", [])
    new = {campaign.name_of(row) for row in rows}
    every = [row for row in kept if campaign.name_of(row) not in new] + rows
    write_results(path, {"rows": sorted(every, key=campaign.name_of)})


def read_rows(name: str, folder: Path = MEASURED) -> list[Row]:
    """Return the rows of a results file."""
    found: list[Row] = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))["rows"]
    return found


def table(name: str, folder: Path = MEASURED) -> str:
    """Return the counts as text, with a total of each group of several rows."""
    rows, campaign = read_rows(name, folder), CAMPAIGNS[name]
    lines = [[*campaign.names, *campaign.counts]]
    for group in dict.fromkeys(row[campaign.names[0]] for row in rows):
        found = [row for row in rows if row[campaign.names[0]] == group]
        lines += [[*campaign.name_of(row), *(row[key] for key in campaign.counts)] for row in found]
        if len(found) > 1:
            gap = [""] * (len(campaign.names) - 2)
            lines.append([group, "together", *gap, *campaign.total(found)])
    widths = [max(len(str(line[i])) for line in lines) + 2 for i in range(len(lines[0]))]
    return "\n".join(
        "".join(str(cell).ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def totals(name: str, folder: Path = MEASURED) -> str:
    """Return a Markdown table with one row per group."""
    rows, campaign = read_rows(name, folder), CAMPAIGNS[name]
    first = campaign.names[0]
    lines = [[first, *campaign.counts], ["---"] * (1 + len(campaign.counts))]
    for group in dict.fromkeys(row[first] for row in rows):
        counts = campaign.total([row for row in rows if row[first] == group])
        lines.append([group, *(f"{count:,}" for count in counts)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
