"""The documentation tells the truth: its code runs, and pages made from code are up to date."""

from __future__ import annotations

import re
import runpy
import shlex
from pathlib import Path

import pytest

from perdure.cli.main import main

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "write-a-method.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def _file(text: str) -> str | None:
    found = re.match(r"# file: (\S+)\n", text)
    return found[1] if found else None


def test_the_methods_of_the_page_are_short() -> None:
    files = {_file(text): text for kind, text in BLOCKS if kind == "python" and _file(text)}
    assert set(files) == {"brake.py", "smooth.py", "my_scaffold.py"}
    assert all(len(text.splitlines()) <= 75 for text in files.values())


def test_the_page_can_be_followed_from_its_first_to_its_last_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shown = []
    for kind, text in BLOCKS:
        capsys.readouterr()
        _follow(kind, text)
        shown.append(capsys.readouterr().out)
    (said,) = (out for out in shown if out.startswith("fedavg: ACC"))
    found = {name: float(fgt) for name, fgt in re.findall(r"(\w+): ACC .*, FGT (.*)", said)}
    assert found["brake"] < found["fedavg"]


def _follow(kind: str, text: str) -> None:
    """Do what a block says: save a file, run commands, or execute Python."""
    name = _file(text)
    if name is not None:
        Path(name).write_text(text, encoding="utf-8")
    elif kind == "sh":
        for line in text.splitlines():
            program, *words = shlex.split(line)
            assert (program, main([*words])) == ("perdure", 0)
    elif kind == "python":
        exec(compile(text, "write-a-method.md", "exec"), {})
    else:
        assert kind == "text"


@pytest.mark.parametrize("page", ["config.md", "metrics.md", "combinations.md"])
def test_pages_made_from_the_code_are_up_to_date(page: str) -> None:
    tool = runpy.run_path(str(ROOT / "tools" / "reference.py"))
    made = tool["PAGES"][page]()
    assert (ROOT / "docs" / page).read_text(encoding="utf-8") == made, "run: make docs"


@pytest.mark.parametrize(
    "page", ["README.md", *(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))]
)
def test_links_to_files_lead_somewhere(page: str) -> None:
    path = ROOT / page
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", path.read_text(encoding="utf-8")):
        assert (path.parent / target).exists(), target
