"""The README says what is true: its code runs, its output is what comes out, its table fits."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest
import yaml
from PIL import Image

from perdure.cli.demo import PERMUTED
from perdure.config import parse
from perdure.methods.registry import KINDS, build
from perdure.training.experiment import build_experiment
from tools import readme_picture

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    """Return the code blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def test_the_ten_lines_print_what_the_readme_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(blocks("python")[0], "README.md", "exec"), {})
    assert printed.getvalue() == blocks("text")[0]


def test_the_custom_method_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    module = tmp_path / "stay_close.py"
    module.write_text(blocks("python")[1], encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    import stay_close  # type: ignore[import-not-found]

    assert stay_close.result.values["method"] == "stay_close.StayClose"


def test_the_config_builds_an_experiment_of_five_tasks() -> None:
    (config,) = blocks("yaml")
    assert build_experiment(parse(yaml.safe_load(config))).task_count == 5


def test_the_picture_is_small_and_made_by_a_tool() -> None:
    (name,) = re.findall(r"!\[[^\]]+\]\((\S+\.png)\)", README)
    path = Path(__file__).parents[2] / name
    assert path == readme_picture.PICTURE
    assert path.stat().st_size < 200_000
    with Image.open(path) as image:
        assert image.width == readme_picture.WIDTH == 1200
        assert image.convert("RGB").getpixel((0, 0)) == (255, 255, 255)


def test_the_demo_table_has_a_row_per_method() -> None:
    table = README.partition("<!-- demo -->")[2].partition("<!-- /demo -->")[0]
    for run in PERMUTED.methods.values():
        assert f"| {run.method['kind']} |" in table


@pytest.mark.parametrize("kind", KINDS)
def test_the_methods_table_says_what_the_server_sees(kind: str) -> None:
    (row,) = [line for line in README.splitlines() if line[:1] == "|" and f"`{kind}`" in line]
    server_sees = row.split("|")[-2]
    assert ("each client" in server_sees) == bool(build({"kind": kind}).needs.per_client_fields)


def test_the_number_of_methods_is_that_of_the_registry() -> None:
    assert f"**{len(KINDS)} methods under one protocol.**" in README
