"""The list of commands, which is printed without loading any of them."""

from __future__ import annotations

import pytest

from perdure.cli.main import COMMANDS, find_command


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_says_of_a_command_what_its_docstring_says(name: str) -> None:
    said = (find_command(name).help or "").partition("\n\n")[0]
    assert " ".join(said.split()) == COMMANDS[name].help
