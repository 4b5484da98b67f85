"""CONTRIBUTING.md names places that exist, and says for every registry where to edit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SRC = ROOT / "src" / "perdure"
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    """Return the text below a heading."""
    return TEXT.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def places(text: str) -> list[str]:
    """Return what stands in backticks and looks like a file or a folder."""
    return re.findall(r"`([\w./-]+(?:/|\.(?:py|md|yaml|txt)))`", text)


@pytest.mark.parametrize(
    "title", ["Conventions", "Set up and test", "Where to edit", "Where to look", "The map"]
)
def test_places_exist(title: str) -> None:
    found = places(section(title))
    # files of a run or a node, which are not of the tree
    found = [place for place in found if place not in {"log/"}]
    missing = [p for p in found if not (SRC / p).exists() and not (ROOT / p).exists()]
    assert missing == []


def test_every_registry_is_named_with_its_file() -> None:
    rows = [row.split("|") for row in section("Where to edit").splitlines() if row[:1] == "|"]
    named = {}
    for _, _, where, line, _ in rows:
        for registry in re.findall(r"`([A-Z][A-Z_]+)`", line):
            named[registry] = (places(line) or places(where))[0]
    for registry, place in named.items():
        assert re.search(rf"^{registry}\b", (SRC / place).read_text("utf-8"), re.M), registry
    texts = [path.read_text(encoding="utf-8") for path in SRC.rglob("*.py")]
    there = {name for text in texts for name in re.findall(r"^([A-Z_]+): Registry\[", text, re.M)}
    assert there <= set(named)


def test_the_map_is_of_the_packages() -> None:
    named = set(re.findall(r"`(\w+)`", section("The map").replace("`src/perdure`", "")))
    packages = {path.parent.name for path in SRC.glob("*/__init__.py")}
    assert packages <= named


def test_conventions_are_short() -> None:
    assert len(section("Conventions").splitlines()) <= 60
