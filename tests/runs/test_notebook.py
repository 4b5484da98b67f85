"""In a notebook: a progress bar, short reprs, tables as HTML, frames, figures, classes of cells."""

from __future__ import annotations

import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import perdure
from perdure.core.errors import UserError
from perdure.core.notebook import html_table
from perdure.core.registry import dotted_path, find_given
from perdure.report.comparison import compare_groups
from perdure.runs.compare.compare import Outcome
from perdure.runs.compare.variants import MethodChoice
from perdure.runs.records import read_runs

TINY: dict[str, Any] = {
    "data": {"limit": 60, "test_limit": 30},
    "stream": {"tasks": 2},
    "clients": {"count": 2},
    "model": {"kind": "mlp", "hidden": [4]},
    "train": {"rounds": 2, "max_steps": 1},
}


class Tags(HTMLParser):
    """Collects the tags and the text of HTML."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> perdure.Result:
    config = TINY | {"evaluate": {"metrics": ["accuracy", "macro_f1"]}}
    return perdure.run(config, out=tmp_path_factory.mktemp("runs") / "run")


class FakeNotebook:
    """Stands for IPython in the kernel of a notebook; keeps what is displayed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kernel: bool = True) -> None:
        self.shown: list[str] = []
        shell = SimpleNamespace(config={"IPKernelApp": {}} if kernel else {})
        package, display = ModuleType("IPython"), ModuleType("IPython.display")
        package.get_ipython = lambda: shell  # type: ignore[attr-defined]
        display.display = self.display  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "IPython", package)
        monkeypatch.setitem(sys.modules, "IPython.display", display)

    def display(self, value: Any, display_id: bool) -> Any:
        self.update(value)
        return self

    def update(self, value: Any) -> None:
        self.shown.append(value._repr_html_())


def test_a_notebook_shows_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = FakeNotebook(monkeypatch)
    perdure.run(TINY)
    assert notebook.shown[-1].startswith('<progress value="4" max="4"></progress> fedavg, rounds:')
    assert "task 2 of 2, task_agnostic accuracy 0." in notebook.shown[-1]


def test_a_callers_own_watch_replaces_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = FakeNotebook(monkeypatch)
    events: list[str] = []
    perdure.run(TINY, watch=lambda state, event: events.append(event["event"]))
    assert notebook.shown == []
    assert events.count("task") == 2


@pytest.mark.parametrize("kernel", [None, False])
def test_nothing_is_shown_elsewhere(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kernel: bool | None
) -> None:
    shown = FakeNotebook(monkeypatch, kernel=False).shown if kernel is not None else []
    perdure.run(TINY)
    assert shown == []
    assert capsys.readouterr().out == ""


@pytest.mark.slow
def test_a_comparison_has_a_bar(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    notebook = FakeNotebook(monkeypatch)
    outcome = perdure.compare(TINY, "fedavg", [0], out=tmp_path, references="none")
    assert '<progress value="1" max="1">' in notebook.shown[-1]
    assert repr(outcome) == f"Outcome({tmp_path}, Comparison(fedavg; 1 seeds))"


def test_reprs_are_one_short_line(result: perdure.Result) -> None:
    assert result.path is not None
    model = perdure.load(result.path)
    comparison = compare_groups(read_runs([result.path]).groups)
    acc = result.metrics["task_agnostic"]["ACC"]
    assert repr(result).startswith(f"Result(fedavg, seed 0, 2 tasks, task_agnostic ACC {acc:.3f}")
    assert repr(model).startswith(
        "TrainedModel(fedavg, mlp with 310 parameters, 2 tasks, 10 classes"
    )
    assert repr(comparison) == "Comparison(fedavg; 1 seeds)"
    for value in (result, model, comparison, Outcome(result.path, comparison, ())):
        assert len(repr(value)) < 300
        assert "\n" not in repr(value)
        assert "table" in Tags(value._repr_html_()).tags


def test_html_has_the_numbers(result: perdure.Result) -> None:
    texts = Tags(result._repr_html_()).texts
    assert f"{result.metrics['task_aware']['ACC']:.3f}" in texts
    assert f"{np.mean(result.scores['macro_f1']['task_agnostic'][-1]):.3f}" in texts


def test_text_of_strangers_is_escaped(result: perdure.Result) -> None:
    bad = "<script>alert(1)</script>"
    assert "script" not in Tags(html_table(bad, [bad], [[bad, bad]])).tags
    values = result.values | {"method": bad, "scores": {bad: result.scores["macro_f1"]}}
    assert "script" not in Tags(perdure.Result(values, Path(bad))._repr_html_()).tags
    assert result.path is not None
    (group,) = read_runs([result.path]).groups.values()
    assert "script" not in Tags(compare_groups({bad: group})._repr_html_()).tags


def test_a_frame_holds_the_matrix(result: perdure.Result) -> None:
    frame = result.to_frame()
    assert list(frame.columns) == ["mode", "after", "task", "accuracy", "macro_f1"]
    chosen = frame[frame["mode"] == "task_aware"].pivot(index="after", columns="task")
    matrix = np.array(result.matrix["task_aware"], dtype=float)
    np.testing.assert_array_equal(chosen["accuracy"].to_numpy(), matrix)


def test_a_frame_of_a_comparison(result: perdure.Result) -> None:
    assert result.path is not None
    frame = compare_groups(read_runs([result.path]).groups).to_frame()
    row = frame[(frame["mode"] == "task_agnostic") & (frame["measure"] == "ACC")]
    assert row["mean"].item() == result.metrics["task_agnostic"]["ACC"]


def test_a_frame_needs_pandas(result: perdure.Result, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UserError, match=r"to_frame: requires pip install 'perdure\[notebook\]'"):
        result.to_frame()


def test_figures_show_inline(result: perdure.Result) -> None:
    figures = result.figures()
    assert figures["matrix-task_agnostic"]._repr_png_().startswith(b"\x89PNG")
    assert Tags(figures._repr_html_()).tags.count("img") == len(figures) > 3
    with pytest.raises(UserError, match="out: must be a run directory for figures"):
        perdure.Result(result.values, None).figures()


CELL = """
from dataclasses import dataclass
import perdure, sys
from perdure import Method, Metric, Train
from perdure.data.streams.permuted import PermutedStream
from torch import nn

if len(sys.argv) > 2:
    @dataclass(frozen=True)
    class Brake(Method):
        def exchanges(self, context):
            return [Train()]

    class Net(nn.Module):
        def __init__(self, num_classes=10):
            super().__init__()
            self.body, self.head = nn.Linear(64, 4), nn.Linear(4, num_classes)

        def forward(self, x):
            return self.head(self.body(x.flatten(1)).relu())

    class Half(Metric):
        def value(self, counts):
            return 0.5

    class Mine(PermutedStream):
        pass

    config = {
        "data": {"limit": 60, "test_limit": 30}, "stream": {"kind": Mine, "tasks": 2},
        "clients": {"count": 2}, "method": {"kind": Brake}, "train": {"rounds": 1, "max_steps": 1},
        "model": {"kind": Net, "num_classes": "auto"}, "evaluate": {"metrics": ["accuracy", Half]},
    }
    first = perdure.run(config, out=sys.argv[1])
    assert perdure.resume(sys.argv[1]).values["model_sha256"] == first.values["model_sha256"]
    assert perdure.extend(sys.argv[1], tasks=1).values["tasks"] == 3
    assert len(perdure.load(sys.argv[1]).class_names) == 10
else:
    perdure.resume(sys.argv[1], trust=True)
"""


@pytest.mark.slow
def test_classes_of_main_work_and_another_process_is_told_what_to_do(tmp_path: Path) -> None:
    def cell(*words: str) -> subprocess.CompletedProcess[str]:
        program = [sys.executable, "-c", CELL, str(tmp_path / "run"), *words]
        return subprocess.run(program, capture_output=True, text=True, timeout=120)

    assert cell("defined").returncode == 0
    sentence = cell().stderr.strip().splitlines()[-1]
    assert "needs __main__.Brake, which was defined in a notebook or script" in sentence
    assert "define it again in this process, or move it to a file" in sentence


def test_a_class_that_was_defined_again_is_the_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    main = sys.modules["__main__"]
    old, new = (type("Cell", (), {"__module__": "__main__"}) for _ in range(2))
    monkeypatch.setattr(main, "Cell", new, raising=False)
    assert find_given(dotted_path(old)) is old
    assert find_given(dotted_path(new)) is None  # it is found in its module


def test_a_comparison_refuses_classes_without_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Local(perdure.Method):
        pass

    path = dotted_path(Local)
    with pytest.raises(UserError, match=r"must be a class in a file, .*<locals>"):
        perdure.compare(TINY, [MethodChoice(path)], [0], out=tmp_path / "c", references="none")
    assert not (tmp_path / "c").exists()
