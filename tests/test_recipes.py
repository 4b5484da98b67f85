"""The headers of recipes."""

from __future__ import annotations

from pathlib import Path

import pytest

from perdure.errors import UserError
from perdure.recipes import read_recipe, recipes

COMMAND = "# perdure run recipes/x.yaml\n"
HEADER = "# paper: FOT | table: Table 1 | size: paper | minutes: 70\n"


def _write(folder: Path, text: str) -> Path:
    path = folder / "x.yaml"
    path.write_text(text)
    return path


def test_the_command_and_the_header_are_read(tmp_path: Path) -> None:
    found = read_recipe(_write(tmp_path, f"{COMMAND}{HEADER}# more: words | here\nseed: 0\n"))
    assert found.command == "perdure run recipes/x.yaml"
    assert (found.paper, found.table, found.size) == ("FOT", "Table 1", "paper")
    assert found.minutes == 70


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "second line"),
        (COMMAND + "#\n", "second line"),
        (COMMAND + "# paper: FOT | size: small | minutes: 1", "second line"),
        (COMMAND + HEADER.replace("size: paper", "size: huge"), "'huge', allowed: small or paper"),
        (COMMAND + HEADER.replace("70", "long"), "'long', allowed: a number"),
    ],
)
def test_a_header_that_cannot_be_read_is_named(tmp_path: Path, text: str, match: str) -> None:
    with pytest.raises(UserError, match=match):
        read_recipe(_write(tmp_path, text))


def test_every_recipe_of_the_repository_has_a_header() -> None:
    found = recipes()
    assert {recipe.path for recipe in found} == set(found[0].path.parent.glob("*.yaml"))
    assert [recipe.size for recipe in found] == sorted((r.size for r in found), reverse=True)
