"""A pytest plugin for `make test-durations`: CPU seconds of tests, and the budget of each folder.

    PYTHONPATH=. pytest -n 2 -p tools.durations [--record-durations]

Measured is the CPU time of the process that runs a test and of the processes that it waited for,
its fixtures included (a shared fixture counts for the first test that asks for it); on a machine
that others use, seconds on the clock would say nothing. What each worker needs before its first
test counts as the folder `start`. tests/budget.yaml says how much each folder of tests/ may take.
Above it, above the total or with a method above its share, the session ends with exit code 1.
`--record-durations` writes the folders again, a fifth above what was measured, and refuses to where
their sum would exceed the total, which is changed by hand and with a reason.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from perdure.methods.registry import KINDS

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests"
BUDGET = TESTS / "budget.yaml"
MEASURED = ROOT / ".test-durations.json"
START = "start"
SLOWEST = 30
ROOM = 1.2
"""A folder may take so many times what was measured: a shared machine is no exact clock."""


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of the processes that it has waited for."""
    return sum(os.times()[:4])


def folder_of(test: str) -> str:
    """Return the folder of tests/ in which a test lies."""
    return test.removeprefix("tests/").partition("/")[0]


def method_of(test: str, kinds: frozenset[str]) -> str | None:
    """Return the method whose test it is: that of the file's name, or the one that its id names."""
    path, _, name = test.partition("::")
    if folder_of(path) != "methods":
        return None
    stem = Path(path).stem.removeprefix("test_")
    of_file = [kind for kind in kinds if stem == kind or stem.startswith(f"{kind}_")]
    longest = "|".join(map(re.escape, sorted(kinds, key=len, reverse=True)))
    named = set(re.findall(rf"(?<!\w)({longest})(?!\w)", name.partition("[")[2]))
    found = of_file or (named if len(named) == 1 else [])
    return max(found, key=len, default=None)


def sums(seconds: Mapping[str, float], kinds: frozenset[str]) -> tuple[Counter[str], Counter[str]]:
    """Return the seconds of each folder and of each method."""
    folders, methods = Counter[str](), Counter[str]()
    for test, value in seconds.items():
        folders[folder_of(test)] += value
        if method := method_of(test, kinds):
            methods[method] += value
    return folders, methods


def above(
    folders: Mapping[str, float], methods: Mapping[str, float], budget: Mapping[str, Any]
) -> list[str]:
    """Return a sentence for each folder and method, and for the sum, above the budget."""
    allowed = {name: budget["folders"].get(name, 0) for name in folders}
    found = [
        f"{name}: must take at most {allowed[name]} s, took {value:.0f} s"
        for name, value in folders.items()
        if value > allowed[name]
    ]
    found += [
        f"tests of {name}: must take at most {budget['method']} s, took {value:.1f} s"
        for name, value in sorted(methods.items())
        if value > budget["method"]
    ]
    if sum(folders.values()) > budget["total"]:
        found.append(
            f"all tests: must take at most {budget['total']} s, took {sum(folders.values()):.0f} s"
        )
    return found


def recorded(text: str, folders: Mapping[str, float]) -> str:
    """Return the text of the budget with what was measured, or end where the total forbids it."""
    values = {name: math.ceil(ROOM * value) for name, value in sorted(folders.items())}
    total = yaml.safe_load(text)["total"]
    if sum(values.values()) > total:
        raise SystemExit(f"{BUDGET.name}: {sum(values.values())} s are more than the total {total}")
    head = text.partition("\nfolders:")[0]
    return "\n".join([head, "folders:", *(f"  {name}: {s}" for name, s in values.items())]) + "\n"


# ---- The plugin ----


class Durations:
    """Measures in each worker, and adds up in the process that starts the workers."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.last: float | None = None
        self.start = 0.0
        self.seconds: dict[str, float] = defaultdict(float)
        self.found: list[str] = []

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Iterator[None]:
        """Note the seconds since the last report; they travel with this one."""
        before = self.last
        outcome = yield
        self.last = cpu_seconds()
        report = outcome.get_result()  # type: ignore[attr-defined]
        report.cpu = self.last - (before or 0.0)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self) -> None:
        """Begin to measure where the first test begins."""
        if self.last is None:
            self.start = self.last = cpu_seconds()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add the seconds of a phase of a test."""
        self.seconds[report.nodeid] += getattr(report, "cpu", 0.0)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Pass on the start of this worker, or judge what all of them measured."""
        if hasattr(self.config, "workeroutput"):
            self.config.workeroutput["start"] = self.start
            return
        self.seconds[START] += self.start
        MEASURED.write_text(json.dumps(self.seconds, indent=0) + "\n", encoding="utf-8")
        folders, methods = sums(self.seconds, frozenset(KINDS))
        text = BUDGET.read_text(encoding="utf-8")
        if self.config.getoption("--record-durations"):
            BUDGET.write_text(text := recorded(text, folders), encoding="utf-8")
        self.found = above(folders, methods, yaml.safe_load(text))
        if self.found and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_testnodedown(self, node: Any) -> None:
        """Take the start of a worker that has ended."""
        self.seconds[START] += getattr(node, "workeroutput", {}).get("start", 0.0)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the folders, the slowest tests, and what is above the budget."""
        folders, _ = sums(self.seconds, frozenset(KINDS))
        tests = Counter({test: value for test, value in self.seconds.items() if test != START})
        lines = [f"{value:8.1f} s  {name}" for name, value in folders.most_common()]
        lines += [f"{sum(folders.values()):8.1f} s  together", ""]
        lines += [f"{value:8.1f} s  {test}" for test, value in tests.most_common(SLOWEST)]
        terminalreporter.section("CPU seconds")
        for line in [*lines, *self.found]:
            terminalreporter.write_line(line)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that records."""
    words = "write tests/budget.yaml again from what is measured"
    parser.addoption("--record-durations", action="store_true", help=words)


def pytest_configure(config: pytest.Config) -> None:
    """Measure in this process."""
    config.pluginmanager.register(Durations(config))
