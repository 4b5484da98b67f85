"""The shape of the code only falls, and its size stays within the budget."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import house_source
import pytest
import yaml

import house

RECORDED = json.loads(house.SHAPE.read_text(encoding="utf-8"))


def test_the_shape_has_not_risen(traced: tuple[dict[str, int], dict[str, list[str]]]) -> None:
    assert house.risen(traced[0], RECORDED) == []


@pytest.mark.slow
@pytest.mark.parametrize("run", house.TRACED[1:], ids=" ".join)
def test_the_shape_of_other_runs_has_not_risen(run: tuple[str, str]) -> None:
    assert house.risen(house.run_measures(*run)[0], RECORDED) == []


def test_everything_is_recorded() -> None:
    runs = {" ".join(name.split()[:2]) for name in RECORDED if name.endswith("round depth")}
    assert runs == {" ".join(run) for run in house.TRACED}
    assert set(house.SOURCE_MEASURES) <= set(RECORDED)
    assert RECORDED["long files"] == 0


def test_the_size_is_within_the_budget() -> None:
    allowed = house.budget()
    above = {name: value for name, value in house.size().items() if value > allowed[name]}
    assert above == {}, f"more than {allowed}; an addition gets a line in {house.BUDGET.name}"


def test_additions_say_what_and_why() -> None:
    for addition in yaml.safe_load(house.BUDGET.read_text(encoding="utf-8"))["additions"]:
        assert {"name", "files", "lines", "reason"} <= addition.keys()
        assert all(addition[key] for key in ("name", "reason"))


def test_functions_fit_in_the_eye() -> None:
    lengths = house_source.function_lines(house_source.library())
    assert lengths[len(lengths) * 9 // 10] <= 35
    assert lengths[-1] <= 60


FILES = {
    "__init__.py": "",
    "core.py": "class Registry:\n    pass\n\n\nclass Config:\n    kind: str\n",
    "red.py": "from house_of.core import Config\n\n\nclass Red(Config):\n    pass\n",
    "blue.py": (
        "import house_of.core as core\n\n\nclass Blue(core.Config):\n"
        "    def is_red(self, other):\n        return other.kind == 'red'\n"
        "    def is_blue(self, other):\n        return isinstance(other, Blue)\n"
    ),
    "table.py": (
        "from house_of.core import Registry\n"
        "COLORS = Registry('color', {'red': 'house_of.red:Red', 'blue': 'house_of.blue.Blue'})\n"
    ),
    "use.py": (
        "from house_of.table import COLORS\nfrom house_of import once\n\n\n"
        "def use(config, name):\n"
        "    from house_of import red\n"
        "    if isinstance(config, red.Red) or config.kind in ('blue', 'green'):\n"
        "        return name == 'red'\n"
        "    match config:\n        case red.Red():\n            return config['kind'] != 'red'\n"
        "    return config.kind == 'other' or config.kind in COLORS\n"
    ),
    "once.py": (
        "from house_of import use\n\n\ndef one(a):\n    '''Doc.'''\n    b = a\n    return b\n\n\n"
        "def two(a):\n    b = a\n    return b\n\n\ndef three(a):\n    b = 2\n    return b\n"
    ),
}


@pytest.fixture
def tree(tmp_path: Path) -> house_source.Tree:
    folder = tmp_path / "house_of"
    folder.mkdir()
    for name, text in FILES.items():
        (folder / name).write_text(text, encoding="utf-8")
    return house_source.Tree(folder)


def test_files_with_one_importer(tree: house_source.Tree) -> None:
    found = house_source.one_importer(tree)
    assert found == ["once.py <- use.py", "table.py <- use.py", "use.py <- once.py"]  # no kinds


def test_second_dispatches(tree: house_source.Tree) -> None:
    found = [item.split(": ", 1) for item in sorted(house_source.second_dispatch(tree))]
    assert sorted((where.split(":")[0], what) for where, what in found) == [
        ("blue.py", "other.kind == 'red'"),
        ("use.py", "config.kind in ('blue', 'green')"),
        ("use.py", "config.kind in COLORS"),
        ("use.py", "config['kind'] != 'red'"),
        ("use.py", "isinstance(config, red.Red)"),
        ("use.py", "red.Red()"),
    ]


def test_copies_and_cycles(tree: house_source.Tree) -> None:
    assert house_source.duplicates(tree) == ["once.py:4: one", "once.py:10: two"]
    assert house_source.cycles(tree) == ["once.py", "use.py"]
    assert house_source.long_files(tree, lines=8) == ["once.py: 17", "use.py: 12"]


def test_files_that_a_method_needs(tmp_path: Path) -> None:
    files = {
        "methods/fot.py": "from house_of.methods.parts import bases\nimport house_of.core\n",
        "methods/parts/bases.py": "from house_of.algebra.svd import svd\n",
        "algebra/svd.py": "from house_of.methods import fot\n",
        "methods/gpm.py": "",
        "core.py": "from house_of.methods import gpm\n",
    }
    for name in ("", "methods", "methods/parts", "algebra"):
        files[f"{name}/__init__.py".lstrip("/")] = ""
    for name, text in files.items():
        path = tmp_path / "house_of" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    tree = house_source.Tree(tmp_path / "house_of")
    found = house_source.needed_files("house_of.methods.fot", tree)
    assert sorted(found) == ["algebra/svd.py", "methods/parts/bases.py"]


TRACED = (
    "class Method:\n    pass\n\n\n"
    "def run():\n    build(None)\n    method = build(Method())\n    begin_task()\n"
    "    train_round()\n    train_round()\n    task_event()\n    write_run_report(method)\n\n\n"
    "def build(method):\n    return method\n\n\n"
    "def begin_task():\n    return [inner() for _ in range(2)]\n\n\n"
    "def train_round():\n    class Local:\n        pass\n    return (lambda: inner())()\n\n\n"
    "def inner():\n    return Method()\n\n\n"
    "def task_event():\n    return None\n\n\n"
    "def write_run_report(method):\n    return task_event()\n"
)


def test_a_trace_counts_rounds_tasks_and_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "traced.py").write_text(TRACED, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(house, "SRC", tmp_path)
    import traced

    trace = house.Trace(tmp_path, traced.Method)
    values = trace.record(traced.run)
    del sys.modules["traced"]

    def names(section: str) -> list[str]:
        return [item.split(": ")[1] for item in values[section]["items"]]

    assert names("round") == ["train_round", "inner"]
    assert (values["round"]["calls"], values["round"]["depth"]) == (
        4,
        4,
    )  # run, round, lambda, inner
    assert names("task") == ["begin_task", "inner", "train_round", "task_event"]
    assert names("report") == ["write_run_report", "task_event"]
    assert names("run")[:2] == ["run", "build"]
    assert values["run"]["functions"] == 7
    assert values["built"] == 5  # one by build, four by inner


def test_what_rises_is_not_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(house, "SHAPE", tmp_path / "shape.json")
    monkeypatch.setattr(house, "BUDGET", tmp_path / "budget.yaml")
    house.SHAPE.write_text('{"depth": 5, "report calls": 100}', encoding="utf-8")
    text = "# Why\nbase:\n  files: 10\n\nadditions:\n  - {name: a, files: 2, reason: b}\n"
    house.BUDGET.write_text(text, encoding="utf-8")
    with pytest.raises(SystemExit, match="depth: must be at most 5, got 6"):
        house.record({"depth": 6, "report calls": 50}, {"files": 3})
    assert json.loads(house.SHAPE.read_text()) == {"depth": 5, "report calls": 100}
    house.record({"depth": 4, "report calls": 102, "new": 7, "round calls": 3}, {"files": 9})
    assert json.loads(house.SHAPE.read_text()) == {"depth": 4, "report calls": 100, "new": 7}
    assert house.BUDGET.read_text() == text.replace("10", "7")
    assert house.budget() == {"files": 9}
