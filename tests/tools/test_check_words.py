"""The checker of words finds what it lists, and nothing else."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import check_words
from check_words import PHRASES, RETIRED, check

BAD = (
    "a method of its own", "ten rounds a task", "60 runs in all.", "the run goes on",
    "data that comes along", "layers that stand still", "the task is told", "without it, the mean",
    "decides by itself", "an optimiser", "normalised inputs", "vectorised clients",
    "randomised rounds", "a hyper-parameter", "a whole number", "somebody who watches",
    "whoever has the key", "drawn anew", "its neighbours", "a grey image", "the colour of a line",
    "a labelled image", "None: all of them", "Who holds the key", "got 3, allowed: 1 or 2",
)  # fmt: skip
"""One sample per phrase, in their order."""
GOOD = (
    "a custom method", "ten rounds per task", "60 runs in all tasks", "the run ends on a round",
    "data that comes later", "layers that still stand", "the task is given", "without items",
    "decides alone", "an optimizer, an optimist", "normalized inputs", "vectorized clients",
    "randomized rounds, this", "a hyperparameter", "a number", "some body", "a key",
    "drawn again", "its neighbors", "a gray image", "the color of a line", "a labeled image",
    "if None, all of them", "clients who hold the key", "must be 1 or 2, got 3; allowed",
)  # fmt: skip


@pytest.mark.parametrize(("pattern", "sentence"), list(zip(PHRASES, BAD, strict=True)))
def test_every_phrase_is_found(pattern: str, sentence: str) -> None:
    (finding,) = check("page.md", f"First line.\nThen {sentence}\n")
    assert finding.line == 2
    assert finding.message.endswith(f"write {PHRASES[pattern]}")


@pytest.mark.parametrize("sentence", GOOD)
def test_good_prose_has_no_finding(sentence: str) -> None:
    assert check("page.md", sentence) == []


def test_there_are_25_phrases() -> None:
    assert len(PHRASES) == len(BAD) == 25


@pytest.mark.parametrize(
    "code",
    [
        "# the run\n#   goes on\n",
        '"""The run goes\non."""\n',
        'text = "the run goes " "on"\n',
        'text = f"{name} goes on"\n',
        'text = (\n    "goes "\n    "on"\n)\n',
    ],
)
def test_phrases_are_found_in_comments_and_strings_across_lines(code: str) -> None:
    (finding,) = check("new.py", code)
    assert finding.message.startswith("'goes on': ")


def test_code_is_not_prose() -> None:
    assert check("new.py", "goes = on = 1\nvalue = {None: goes}\ntext = 'goes', 'on'\n") == []


@pytest.mark.parametrize("name", RETIRED)
def test_every_retired_name_is_found(name: str) -> None:
    (finding,) = check("new.py", f"\nclass {name}:\n    pass\n")
    assert str(finding) == f"new.py:2: {name!r} is retired, use {RETIRED[name]!r}"


@pytest.mark.parametrize(
    "code",
    [
        "def Tally(): pass", "async def Tally(): pass", "def f(Tally): pass", "f(Tally=1)",
        "x.Tally", "Tally = 1", "from perdure import Tally", "from perdure import x as Tally",
        "import perdure.Tally", "import perdure\nperdure.Tally",
    ],
)  # fmt: skip
def test_retired_names_are_found_wherever_a_name_can_be(code: str) -> None:
    assert any("'Tally' is retired" in finding.message for finding in check("new.py", code))


def test_names_of_other_packages_are_theirs() -> None:
    assert check("new.py", "import ast\nast.Pass\n") == []
    assert check("new.py", "ast = 1\nast.Pass\n") != []


def test_a_name_may_have_another_meaning_in_a_folder() -> None:
    assert check("src/perdure/privacy/secagg/wire.py", "class Shares: ...\n") == []
    assert check("src/perdure/data/partition.py", "class Shares: ...\n") != []


def test_the_command_says_where_and_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check_words, "ROOT", tmp_path)
    (tmp_path / "page.md").write_text("Drawn\nanew.\n")
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools/check_words.py").write_text("Drawn anew.\n")
    assert check_words.main(["page.md", "tools/check_words.py"]) == 1
    assert capsys.readouterr().out == "page.md:2: 'anew': write 'again'\n"
    (tmp_path / "page.md").write_text("Drawn\nagain.\n")
    assert check_words.main(["page.md"]) == 0
