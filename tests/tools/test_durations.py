"""The budget of each folder of tests, and the choice of tests for `make quick`."""

from __future__ import annotations

import pytest
import yaml

from tools.durations import BUDGET, START, TESTS, above, folder_of, method_of, recorded, sums

KINDS = frozenset({"fot", "fedavg", "ewc", "special", "special-c"})
SECONDS = {
    "tests/core/test_trees.py::test_a": 1.0,
    "tests/methods/test_fot_closing.py::test_b[x]": 2.0,
    "tests/methods/test_engines.py::test_c[fot-vector]": 3.0,
    START: 4.0,
}
TEXT = "# Why\ntotal: {total}\nmethod: 4\nfolders:\n  core: 1\n"


@pytest.mark.parametrize(
    ("test", "method"),
    [
        ("tests/methods/test_fot.py::test_a", "fot"),
        ("tests/methods/test_fot_closing.py::test_a[ewc]", "fot"),
        ("tests/methods/test_engines.py::test_a[ewc-vector]", "ewc"),
        ("tests/methods/test_engines.py::test_a[special-c-vector]", "special-c"),
        ("tests/methods/test_pairs.py::test_a[ewc-fot]", None),
        ("tests/methods/test_engines.py::test_a[vector]", None),
        ("tests/golden/test_golden.py::test_a[fot]", None),
    ],
)
def test_the_method_of_a_test(test: str, method: str | None) -> None:
    assert method_of(test, KINDS) == method


def test_seconds_are_added_by_folder_and_by_method() -> None:
    folders, methods = sums(SECONDS, KINDS)
    assert folders == {"core": 1, "methods": 5, START: 4}
    assert methods == {"fot": 5}


def test_what_is_above_the_budget_is_named() -> None:
    folders, methods = sums(SECONDS, KINDS)
    budget = {"total": 9, "method": 4, "folders": {"core": 1, "methods": 4}}
    assert above(folders, methods, budget) == [
        "methods: must take at most 4 s, took 5 s",
        "start: must take at most 0 s, took 4 s",
        "tests of fot: must take at most 4 s, took 5.0 s",
        "all tests: must take at most 9 s, took 10 s",
    ]
    budget = {"total": 10, "method": 5, "folders": {"core": 1, "methods": 5, START: 4}}
    assert above(folders, methods, budget) == []


def test_a_folder_is_written_with_room_and_the_total_stays() -> None:
    written = recorded(TEXT.format(total=20), {"methods": 5.0, START: 4.0})
    assert written == "# Why\ntotal: 20\nmethod: 4\nfolders:\n  methods: 6\n  start: 5\n"
    with pytest.raises(SystemExit, match="11 s are more than the total 10"):
        recorded(TEXT.format(total=10), {"methods": 5.0, START: 4.0})


def test_the_budget_is_of_the_folders_that_are_there() -> None:
    budget = yaml.safe_load(BUDGET.read_text(encoding="utf-8"))
    with_tests = {folder_of(path.relative_to(TESTS.parent).as_posix()) for path in TEST_FILES}
    assert set(budget["folders"]) == with_tests | {START}
    assert sum(budget["folders"].values()) <= budget["total"] <= 720  # six minutes on two cores


TEST_FILES = sorted(TESTS.rglob("test_*.py"))


def test_quick_tests_are_one_file_of_each_package() -> None:
    lines = (TESTS / "quick.txt").read_text(encoding="utf-8").split()
    packages = {path.parent.name for path in (TESTS.parent / "src/perdure").glob("*/__init__.py")}
    assert [folder_of(line) for line in lines] == sorted({*packages, "house"})
    assert all((TESTS.parent / line).is_file() for line in lines)


def test_every_package_has_a_folder_of_tests() -> None:
    packages = {path.parent.name for path in (TESTS.parent / "src/perdure").glob("*/__init__.py")}
    crossing = {
        "adversaries", "benchmarks", "claims", "docs", "faults", "golden", "house", "packaging",
        "parity", "tools",
    }  # fmt: skip
    folders = {folder_of(path.relative_to(TESTS.parent).as_posix()) for path in TEST_FILES}
    assert folders == packages | crossing
    assert not list(TESTS.glob("test_*.py"))
