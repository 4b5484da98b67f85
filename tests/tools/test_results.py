"""Results files: the hash of the code, and which files other code has made."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.results import (
    ROOT,
    WITHOUT,
    code_hash,
    kept_results,
    outdated,
    with_block,
    write_results,
)

SOURCE = '"""A module."""\n\ndef f(x):\n    """Return it."""\n    return x + 1  # why\n'


@pytest.fixture
def package(tmp_path: Path) -> Path:
    (tmp_path / "core").mkdir()
    (tmp_path / "cli").mkdir()
    (tmp_path / "core" / "f.py").write_text(SOURCE)
    (tmp_path / "cli" / "main.py").write_text(SOURCE)
    (tmp_path / "core" / "weights.bin").write_bytes(b"1")
    return tmp_path


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("core/f.py", SOURCE.replace("x + 1", "x + 2")),
        ("core/f.py", SOURCE + "\nTEXT = 'a # b'\n"),
        ("core/new.py", ""),
        ("core/weights.bin", "2"),
    ],
)
def test_code_and_data_change_the_hash(package: Path, file: str, text: str) -> None:
    before = code_hash(package)
    (package / file).write_text(text)
    assert code_hash(package) != before


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("core/f.py", SOURCE.replace("# why", "# because").replace("Return it", "Add\n\n    one")),
        ("core/f.py", SOURCE.replace("\n\n", "\n\n\n# a comment\n")),
        ("cli/main.py", "print()"),
    ],
)
def test_words_and_the_command_line_do_not(package: Path, file: str, text: str) -> None:
    before = code_hash(package)
    (package / file).write_text(text)
    assert code_hash(package) == before


def test_a_string_that_looks_like_a_comment_counts(package: Path) -> None:
    (package / "core" / "f.py").write_text("x = 'a # b'\n")
    before = code_hash(package)
    (package / "core" / "f.py").write_text("x = 'a # c'\n")
    assert code_hash(package) != before


def test_packages_that_do_not_count_are_there() -> None:
    for name in WITHOUT:
        assert (ROOT / "src" / "perdure" / name).is_dir(), f"{name}: rename it in tools/results.py"


def test_files_of_other_code_are_listed(tmp_path: Path) -> None:
    write_results(tmp_path / "new.json", {"runs": {"a": 1}})
    (tmp_path / "old.json").write_text(json.dumps({"code": "0123", "runs": {}}))
    (tmp_path / "older.json").write_text(json.dumps({"runs": {}}))
    assert outdated(tmp_path) == {
        "old.json": f"its code is 0123, the tree's is {code_hash()}",
        "older.json": "it names no code",
    }
    assert kept_results(tmp_path / "new.json")["runs"] == {"a": 1}
    assert [kept_results(tmp_path / name) for name in ("old.json", "none.json")] == [{}, {}]


def test_a_table_of_a_page_is_replaced_once() -> None:
    page = "a\n<!-- figures: docs/measured/x.json -->\nold\n<!-- /figures -->\nb"
    new = with_block(page, "x", "| new |")
    assert "old" not in new
    assert "| new |" in new
    assert with_block(new, "x", "| new |") == new
    with pytest.raises(SystemExit, match=r"needs one .*y\.json"):
        with_block(page, "y", "")
