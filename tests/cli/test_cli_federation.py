"""perdure federation: its commands stand together, and the old names still work."""

from __future__ import annotations

from pathlib import Path

import pytest
from shells import Shell, one_sentence

COMMANDS = ("server", "node", "submit")


def test_the_commands_stand_together(shell: Shell) -> None:
    words = set(shell("federation", "--help").out.split())
    assert {"init", *COMMANDS} <= words


def test_the_old_names_are_not_in_the_help(shell: Shell) -> None:
    first_words = {line.strip("│ ").partition(" ")[0] for line in shell("--help").out.splitlines()}
    assert "federation" in first_words
    assert not first_words & set(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_an_old_name_names_the_new_one_and_does_the_same(shell: Shell, name: str) -> None:
    words = ["split-digits", "--server", "nowhere"] if name == "submit" else ["nowhere"]
    new, old = shell("federation", name, *words), shell(name, *words)
    one_sentence(new, "nowhere")
    warning, rest = old.err.split("\n", 1)
    assert warning == f"perdure: warning: perdure {name} is now perdure federation {name}"
    assert (old.code, rest) == (2, new.err)


@pytest.mark.parametrize("name", COMMANDS)
def test_an_old_name_has_the_same_options(shell: Shell, name: str) -> None:
    new, old = shell("federation", name, "--help").out, shell(name, "--help").out
    assert "Usage" in new
    assert new.replace(f"perdure federation {name}", "").split() == (
        old.replace(f"perdure {name}", "").split()
    )


def test_start_scripts_and_readme_use_the_new_names(shell: Shell) -> None:
    pytest.importorskip("flwr")
    assert shell("federation", "init", "home", "--nodes", "1").code == 0
    server, node = (Path("home", name, "start.sh").read_text() for name in ("server", "node-0"))
    assert "exec perdure federation server ." in server
    assert "exec perdure federation node . --data" in node
    page = Path("home/README.md").read_text()
    assert "perdure federation submit CONFIG" in page
