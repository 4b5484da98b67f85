"""perdure run, check, methods and recipes, as a user meets them."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from shells import TINY, Shell

import perdure
from perdure.cli import __main__ as entry
from perdure.cli.methods import hyperparameters
from perdure.cli.run import default_folder, expected_tasks
from perdure.config import Config, load, parse
from perdure.methods.registry import KINDS
from perdure.recipes import list_recipes, recipe_path

RECIPES = [recipe.path for recipe in list_recipes()]


def _result(folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return values


def test_a_run_equals_the_library_call(shell: Shell) -> None:
    said = shell("run", shell.config(), "--out", "out")
    assert said.code == 0
    assert _result(Path("out"))["model_sha256"] == perdure.run(TINY).values["model_sha256"]


def test_plain_output_is_a_line_a_task_and_a_last_one(shell: Shell) -> None:
    said = shell("run", shell.config())
    lines = said.out.splitlines()
    matrix = _result(Path("runs/tiny-fedavg-seed0"))["matrix"]["task_agnostic"]
    assert len(lines) == 3
    assert lines[0].startswith(f"task 1 of 2: task_agnostic accuracy {matrix[0][0]:.3f} on it")
    assert f"{matrix[1][1]:.3f} on it, {sum(matrix[1]) / 2:.3f} on all so far" in lines[1]
    assert "ACC" in lines[2]
    assert lines[2].endswith("in runs/tiny-fedavg-seed0")
    assert "\x1b" not in said.out


def test_quiet_prints_the_last_line_alone(shell: Shell) -> None:
    said = shell("run", shell.config(), "--quiet")
    assert len(said.out.splitlines()) == 1
    assert said.err == ""


def test_settings_and_the_engine_reach_the_run(shell: Shell) -> None:
    words = ["--set", "seed=3", "--set", "method.kind=fedprox", "--set", "method.mu=0.5"]
    assert shell("run", shell.config(), *words, "--engine", "vector").code == 0
    folder = Path("runs/tiny-fedprox-seed3")
    kept = yaml.safe_load((folder / "config.yaml").read_text())
    assert kept["method"] == {"kind": "fedprox", "mu": 0.5}
    assert _result(folder)["engine"] == "vector"


def test_the_default_folder_is_a_plain_name() -> None:
    config = parse({"method": {"kind": "my/../file.Method"}, "seed": 7})
    assert default_folder(Path("a/b.yaml"), config) == Path("runs/b-my-..-file.Method-seed7")


def test_a_finished_run_can_be_resumed_and_says_the_same(shell: Shell) -> None:
    file = shell.config()
    first = shell("run", file, "--quiet")
    again = shell("run", file, "--quiet", "--resume")
    assert (again.code, again.out) == (0, first.out)


def test_a_run_that_fails_exits_1_and_says_how_to_go_on(shell: Shell) -> None:
    said = shell("run", shell.config(), "--set", "train.lr=1e30", "--set", "train.batch_size=2")
    last = said.err.splitlines()[-1]
    assert said.code == 1
    assert last.startswith("perdure: error: task 1 round 1: no client's update is finite")
    again = "perdure run tiny.yaml --set train.lr=1e30 --set train.batch_size=2"
    assert last.endswith(f"resume with: {again} --out runs/tiny-fedavg-seed0 --resume")


def test_bars_on_a_terminal_end_with_the_last_state(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    file = shell.config()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", terminal)
        code = shell("run", file, "--set", "runs.evaluate_every=1").code
    matrix = _result(Path("runs/tiny-fedavg-seed0"))["matrix"]["task_agnostic"]
    shown = terminal.getvalue()
    assert code == 0
    for text in ("task 2 of 2", "4/4", "3 of 3 clients uploaded"):
        assert text in shown
    assert f"task_agnostic accuracy {sum(matrix[1]) / 2:.3f} after task 2" in shown
    assert re.search(rf"uploaded, training loss \d\.\d+, accuracy {matrix[1][1]:.3f}", shown)


@pytest.mark.parametrize(
    ("stream", "tasks"),
    [
        ({"kind": "split", "tasks": 3}, 3),
        ({"kind": "domains"}, None),
        ({"kind": "domains", "tasks": 2}, 2),
        ({"kind": "domains", "domains": [{"source": "digits"}] * 2}, 2),
    ],
)
def test_tasks_as_far_as_the_config_tells(stream: dict[str, Any], tasks: int | None) -> None:
    assert expected_tasks(parse({"stream": stream})) == tasks


def test_check_says_what_would_run_and_writes_nothing(shell: Shell) -> None:
    file = shell.config()
    before = shell.files()
    said = shell("check", file, "--set", "train.rounds=[5, 2]")
    weights = 64 * 8 + 8 + 8 * 10 + 10
    assert said.code == 0
    for text in ("2 tasks over 10 classes", "3 clients (3 per round)", f"{weights} weights"):
        assert text in said.out
    assert "7 rounds" in said.out
    assert shell.files() == before


def test_methods_lists_every_kind_with_its_defaults(shell: Shell) -> None:
    said = shell("methods")
    assert said.code == 0
    for kind in KINDS:
        assert f"{kind}: " in said.out
    assert "mu=0.01" in said.out
    assert hyperparameters("fedprox") == {"mu": 0.01}


def test_the_help_says_what_arguments_are(shell: Shell) -> None:
    """Some versions of typer and click together lose it."""
    assert "A run directory" in shell("predict", "--help").out


def test_a_run_in_the_working_folder_is_reported(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = shell.config()
    assert shell("run", file, "--out", "here").code == 0
    monkeypatch.chdir(shell.folder / "here")
    said = shell("report", ".", "--html", "again.html")
    assert said.code == 0, said.err
    assert "here-again" in Path("again.html").read_text()


def test_ctrl_c_while_commands_load_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("perdure.cli.main.main", interrupted)
    assert entry.main() == 130
    assert capsys.readouterr().err == "perdure: stopped: nothing was written\n"


def test_recipes_are_listed_with_their_commands(shell: Shell) -> None:
    said = shell("recipes")
    assert said.code == 0
    for path in RECIPES:
        assert f"  {path.stem} " in said.out
    (row,) = (line for line in said.out.splitlines() if line.split()[:1] == ["pip-mnist-kmnist"])
    assert row.split()[:6] == ["pip-mnist-kmnist", "PIP", "small", "8", "mnist,", "kmnist"]
    assert row.split()[6:] == ["Table", "3;", "Figure", "2"]
    (row,) = (line for line in said.out.splitlines() if line.split()[:1] == ["pip-cifar100-paper"])
    assert " cifar100 " in row
    assert " model.init=vit-b16 " in row


def test_a_recipe_is_printed_as_a_file_to_edit(shell: Shell) -> None:
    said = shell("recipes", "split-digits")
    assert said.out == recipe_path("split-digits").read_text(encoding="utf-8")


def test_a_recipe_is_run_by_its_name_unless_a_file_has_it(shell: Shell) -> None:
    words = ["--set", "stream.tasks=1", "--set", "train.rounds=1", "--set", "data.limit=60"]
    assert shell("run", "permuted-digits", *words, "--engine", "serial", "--quiet").code == 0
    assert _result(Path("runs/permuted-digits-fedavg-seed0"))["tasks"] == 1
    shell.config({"seed": 9}, name="permuted-digits")
    assert shell("run", "permuted-digits", "--quiet").code == 0
    assert _result(Path("runs/permuted-digits-fedavg-seed9"))["tasks"] == 2


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_opens_with_its_command_and_is_good(path: Path, shell: Shell) -> None:
    first = path.read_text().splitlines()[0].removeprefix("# ").split()
    assert first[:2] == ["perdure", "run"]
    assert first[2] == path.stem
    if not _paths(load(path)):
        assert shell("check", *first[2:]).code == 0


def _paths(config: Config) -> list[str]:
    """Data that a recipe needs and the user brings."""
    sources = [config.data, *(getattr(config.stream, "domains", None) or [])]
    return [source.path for source in sources if hasattr(source, "path")]


def test_the_version(shell: Shell) -> None:
    assert shell("--version").out == f"perdure {perdure.__version__}\n"


def test_no_words_show_the_help(shell: Shell) -> None:
    said = shell()
    assert "Usage: perdure" in said.out + said.err
