"""Measured figures of pages: each names the results file that it comes from, or is not printed.

A measured figure is a mean with a deviation, a range or an interval, a decimal number in a cell of
a table, and in prose an accuracy, a percentage, points, seconds or a ratio with digits after the
point. It may stand between `<!-- figures: docs/measured/NAME.json -->` and `<!-- /figures -->`, in
the tables of the demo (tools/readme_table.py writes them) and in code blocks, whose output
tests-docs compares. What a paper reports is no figure of ours.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.results import ROOT
from tools.results_pages import TABLES, outdated_tables

GENERATED = {"config.md", "metrics.md", "combinations.md", "methods.md", "upgrade.md"}
"""Pages made from the code, which holds no figures; their tables show defaults and bounds."""
PAGES = ["README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]
RECIPES = sorted((ROOT / "src" / "perdure" / "recipes").glob("*.yaml"))
BLOCK = re.compile(r"<!-- figures: (\S+) -->.*?<!-- /figures -->", re.DOTALL)
EXEMPT = (
    re.compile(r"<!-- (demo[\w ]*) -->.*?<!-- /\1 -->", re.DOTALL),
    re.compile(r"^( *)```.*?^\1```$", re.DOTALL | re.MULTILINE),
    re.compile(r"`[^`\n]*`"),
)
NUMBER = r"[-+]?\d+\.\d+"
CELL = re.compile(rf"\|\s*\**{NUMBER}( ?%|\s*±.*?|\s*\(.*?\))?\**\s*(?=\|)")
PROSE = (
    re.compile(r"\d\s*±\s*\d"),
    re.compile(rf"\b(ACC|FGT|BWT|Avg|AF|PD|accuracy|learned)\b[^.;:|]{{0,30}}?{NUMBER}"),
    re.compile(rf"{NUMBER} ?(%|percent|points?|s\b|seconds|times)"),
    re.compile(r"\b\d+ times as (fast|long)"),
    re.compile(rf"(?i)\bmeasured\b[^.;|]{{0,60}}?{NUMBER}"),
    re.compile(r"\b\d+ of the \d+ claims"),
)
TABLE = re.compile(r"(?:^\|.*\n?)+", re.MULTILINE)
SIZES = re.compile(r"\| (parameters|MB) \|")
"""Heads of tables of sizes, which are computed from shapes."""
PAPER = re.compile(r"(?i)\bpaper\b")


def figures_in(text: str) -> Iterator[str]:
    """Yield the measured figures of a page that stand outside of marked parts."""
    text = BLOCK.sub("", text)
    for pattern in EXEMPT:
        text = pattern.sub("", text)
    for table in TABLE.findall(text):
        if not SIZES.search(table.partition("\n")[0]):
            yield from (found[0] for found in CELL.finditer(table))
    prose = " ".join(line for line in text.splitlines() if not line.startswith("|"))
    for sentence in re.split(r"(?<=[.;:])\s+(?=[A-Z])", " ".join(prose.split())):
        if not PAPER.search(sentence):
            yield from (found[0] for rule in PROSE for found in rule.finditer(sentence))


def comments_of(recipe: Path) -> str:
    """Return the comments of a recipe as text."""
    lines = recipe.read_text(encoding="utf-8").splitlines()
    return "\n".join(line[1:].strip() for line in lines if line.startswith("#"))


@pytest.mark.parametrize("page", PAGES)
def test_a_page_prints_no_figure_without_its_results_file(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    if Path(page).name not in GENERATED:
        assert list(figures_in(text)) == []
    for found in BLOCK.finditer(text):
        assert json.loads((ROOT / found[1]).read_text(encoding="utf-8"))["code"]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_comments_of_recipes_print_no_figure_of_ours(recipe: Path) -> None:
    assert list(figures_in(comments_of(recipe))) == []


def test_tables_are_those_of_the_results_files() -> None:
    assert outdated_tables() == [], "run: make docs"


def test_every_marked_table_is_written_by_the_tool() -> None:
    shown = {
        (page, Path(found[1]).stem)
        for page in PAGES
        for found in BLOCK.finditer((ROOT / page).read_text(encoding="utf-8"))
        if Path(found[1]).stem != "claims"  # a page that python -m claims writes whole
    }
    assert shown == set(TABLES)


def test_every_results_file_is_shown() -> None:
    held = {path.stem for path in (ROOT / "docs" / "measured").iterdir()}
    assert held == {name for _, name in TABLES} | (held & {"claims"})


@pytest.mark.parametrize(
    "text",
    [
        "| fot | 83.4 ± 0.6 |",
        "| fedavg | 68.4 (66.1 to 70.4) |",
        "| serial | 0.99 | 11.01 |",
        "| digits | 98.6 % |",
        "FOT has an accuracy of 0.851 here.",
        "It was measured with seed 0: 89.57 and 1.35.",
        "Clients are trained up to 11 times as fast as one by one.",
        "A round takes 3.6 s beyond training.",
        "PIP leads by 6.3 points.",
        "25 of the 34 claims hold.",
    ],
)
def test_the_rule_finds_a_figure(text: str) -> None:
    assert list(figures_in(text))
    marked = f"<!-- figures: docs/measured/x.json -->\n\n{text}\n\n<!-- /figures -->"
    assert not list(figures_in(marked))


@pytest.mark.parametrize(
    "text",
    [
        "| `threshold` | float | `0.8` | coverage |",
        "The paper reports ACC 90.35 and FGT 1.75.",
        "Clients that see 60% of the tasks, alpha 0.5, torch 2.13, 22.7M parameters.",
        "| | parameters | MB |\n|---|---|---|\n| head | 76,900 | 0.3 |",
        "```text\nACC 0.83\n```",
        "<!-- demo split -->\n| fot | 0.851 |\n<!-- /demo split -->",
    ],
)
def test_the_rule_leaves_settings_and_papers_alone(text: str) -> None:
    assert not list(figures_in(text))


def test_no_page_promises_what_no_test_proves() -> None:
    """Pages made from the code are compared with it; the words would be true of no other."""
    for page in [*PAGES, "CONTRIBUTING.md"]:
        assert "never by hand" not in (ROOT / page).read_text(encoding="utf-8")
