"""docs/how-it-works.md names what a run calls, in this order; its example does the same."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8")
LISTS = re.findall(r"^```text\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("section", ["run", "round"])
def test_the_lists_are_those_of_a_trace(
    section: str, traced: tuple[dict[str, int], dict[str, list[str]]]
) -> None:
    called = [item.strip() for item in traced[1][f"fot serial {section}"]]
    lines = LISTS[["run", "round"].index(section)].splitlines()
    named = [re.match(r"\S+\.py: \S+", line)[0] for line in lines]
    assert len(named) >= 20
    assert set(named) <= set(called)
    assert sorted(named, key=called.index) == named, "in the order of their first calls"


def test_files_of_the_page_exist() -> None:
    names = re.findall(r"`([a-z_/]+\.py)`", PAGE)
    assert names
    folders = (ROOT / "src" / "perdure", ROOT / "src" / "perdure" / "training" / "engines")
    assert [name for name in names if not any((f / name).is_file() for f in folders)] == []


def test_the_page_has_at_most_100_lines() -> None:
    assert len(PAGE.splitlines()) <= 100


def test_a_round_by_hand_is_a_round_of_the_library(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples" / "the_loop.py"), run_name="__main__")
    printed = capsys.readouterr().out.splitlines()
    assert [line.split(",")[-1] for line in printed] == [" equal"] * 3
