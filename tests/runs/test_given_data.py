"""Runs on data that is given in Python, or returned by a function that a config names."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch.utils.data import TensorDataset

import perdure
from perdure.cli.main import main
from perdure.config import load_saved
from perdure.core.errors import RunError, UserError
from perdure.core.registry import find_given

BASE: dict[str, Any] = {
    "clients": {"count": 3},
    "train": {"rounds": 2, "max_steps": 2},
    "engine": {"kind": "serial"},
    "runs": {"report": False},
}
SPLIT = BASE | {"stream": {"kind": "split", "tasks": 2}}
RNG = np.random.default_rng(0)
NUMBERS = np.arange(120) % 4
X = (RNG.normal(size=(120, 5)) + NUMBERS[:, None]).astype(np.float32)
NAMES = np.array(["cat", "dog", "fox", "owl"])[NUMBERS]


class Killed(Exception):
    """Stands for the end of a process."""


def kill_after(rounds: int) -> Any:
    """Return a callback that ends a run after some rounds."""
    seen: list[str] = []

    def watch(_: Any, event: dict[str, Any]) -> None:
        seen.append(event["event"])
        if seen.count("round") == rounds:
            raise Killed

    return watch


def test_given_arrays_train_as_the_same_arrays_in_a_file(tmp_path: Path) -> None:
    parts = {"x_train": X[:96], "y_train": NAMES[:96], "x_test": X[96:], "y_test": NAMES[96:]}
    np.savez(tmp_path / "mine.npz", **parts)
    file = perdure.run(SPLIT | {"data": {"source": "npz", "path": str(tmp_path / "mine.npz")}})
    given = perdure.run(SPLIT, data=parts)
    assert given.values["model_sha256"] == file.values["model_sha256"]
    tensors = {name: torch.from_numpy(v) if name[0] == "x" else v for name, v in parts.items()}
    assert perdure.run(SPLIT, data=tensors).values["model_sha256"] == file.values["model_sha256"]


def test_a_run_is_resumed_with_the_same_data_alone(tmp_path: Path) -> None:
    whole = perdure.run(SPLIT, data=(X, NAMES))
    out = tmp_path / "run"
    with pytest.raises(Killed):
        perdure.run(SPLIT, data=(X, NAMES), out=out, watch=kill_after(3))
    kind = load_saved(out / "config.yaml").data.source
    assert kind.startswith("given:tuple-")
    assert find_given(kind) is None  # nothing is kept in memory
    again = r"^data.source: must be given again in Python, such as perdure.resume\(run, data=data\)"
    with pytest.raises(UserError, match=again):
        perdure.resume(out)
    other = rf"^data: must be the one that the run was made with, '{kind}', got 'given:tuple-"
    with pytest.raises(UserError, match=other):
        perdure.resume(out, data=(X + 1, NAMES))
    resumed = perdure.resume(out, data=(X.copy(), NAMES.copy()))
    assert resumed.values["model_sha256"] == whole.values["model_sha256"]


def test_the_command_line_says_that_such_a_run_is_resumed_in_python(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    with pytest.raises(Killed):
        perdure.run(SPLIT, data=(X, NAMES), out=out, watch=kill_after(1))
    assert main(["run", str(out / "config.yaml"), "--out", str(out), "--resume", "-q"]) == 2
    error = capsys.readouterr().err.replace("\n", " ")
    assert "must be given again in Python" in error
    assert "perdure.resume(run, data=data)" in error


def test_names_of_classes_reach_predictions(tmp_path: Path) -> None:
    perdure.run(SPLIT, data=(X, NAMES), out=tmp_path / "run")
    np.save(tmp_path / "new.npy", X[:8])
    model = perdure.load(tmp_path / "run")
    predicted = {model.class_names[label] for label in model.predict(X)}
    assert predicted <= {"cat", "dog", "fox", "owl"}
    out = tmp_path / "labels.csv"
    assert (
        main(["predict", str(tmp_path / "run"), str(tmp_path / "new.npy"), "--out", str(out)]) == 0
    )
    assert set(out.read_text().split("\n")[1].split(",")[2:]) <= predicted


def tasks_of_two(task: int) -> Any:
    """Return the examples of two classes."""
    rows = np.isin(NUMBERS, (2 * task, 2 * task + 1))
    return X[rows], NAMES[rows]


def test_a_function_is_asked_for_one_task_when_it_begins() -> None:
    asked: list[int] = []
    known: list[tuple[int, int]] = []

    def give(task: int) -> Any:
        asked.append(task)
        return tasks_of_two(task)

    def watch(state: Any, event: dict[str, Any]) -> None:
        known.append((state.task + (event["event"] == "round"), len(asked)))

    stream = {"stream": {"tasks": 2, "classes": ["cat", "dog", "fox", "owl"]}}
    given = perdure.run(BASE | stream, data=give, watch=watch)
    assert asked == [0, 1]
    assert all(count <= task for task, count in known)
    listed = perdure.run(
        BASE | {"stream": {"kind": "given"}}, data=[tasks_of_two(0), tasks_of_two(1)]
    )
    assert given.values["model_sha256"] == listed.values["model_sha256"]


@pytest.mark.parametrize("method", ["fot", "er", "stamp"])
@pytest.mark.parametrize("head", ["shared", "growing"])
def test_methods_learn_tasks_that_a_function_gives(method: str, head: str) -> None:
    config = BASE | {
        "stream": {"tasks": 2, "classes": ["cat", "dog", "fox", "owl"]},
        "model": {"kind": "mlp", "head": head},
        "method": {"kind": method},
        "data": {"validation": 0.2},
    }
    result = perdure.run(config, data=tasks_of_two)
    assert [len(row) for row in result.matrix["task_aware"] or []] == [2, 2]


def test_a_function_that_changes_its_mind_is_found_on_resume(tmp_path: Path) -> None:
    shift = 0.0

    def give(task: int) -> Any:
        x, y = tasks_of_two(task)
        return x + shift, y

    config = BASE | {"stream": {"tasks": 2, "classes": ["cat", "dog", "fox", "owl"]}}
    whole, out = perdure.run(config, data=give), tmp_path / "run"
    with pytest.raises(Killed):
        perdure.run(config, data=give, out=out, watch=kill_after(3))
    with pytest.raises(UserError, match=r"^data.source: must be given again in Python"):
        perdure.resume(out)
    shift = 1.0
    with pytest.raises(UserError, match=r"^data of task 1: must be that of the run"):
        perdure.resume(out, data=give)
    shift = 0.0
    assert perdure.resume(out, data=give).values["model_sha256"] == whole.values["model_sha256"]


def test_tasks_that_do_not_fit_the_first_end_the_run_with_a_sentence() -> None:
    with pytest.raises(RunError, match=r"^stream.classes: must name all classes, since task 2 has"):
        perdure.run(BASE | {"stream": {"tasks": 2}}, data=tasks_of_two)

    def narrower(task: int) -> Any:
        return X[:, task:], NAMES

    with pytest.raises(RunError, match=r"^data of task 2: must be rows of shape \(5,\)"):
        perdure.run(BASE | {"stream": {"tasks": 2}}, data=narrower)


def test_parts_are_tasks_with_the_names_of_a_dict() -> None:
    parts = {"first": tasks_of_two(0), "second": tasks_of_two(1)}
    result = perdure.run(BASE, data=parts)
    assert result.values["tasks"] == 2
    order = {"stream": {"kind": "given", "order": ["second"], "tasks": 1}}
    assert perdure.run(BASE | order, data=parts).values["tasks"] == 1
    sites = {"north": (X[:60], NAMES[:60]), "south": (X[60:], NAMES[60:])}
    assert perdure.run(BASE | {"stream": {"kind": "domains"}}, data=sites).values["tasks"] == 2


MODULE = """
import numpy as np
def load(root, rows=120):
    y = np.arange(rows) % 4
    return np.random.default_rng(0).normal(size=(rows, 5)) + y[:, None], y
def broken(root):
    raise OSError("no such disk")
def nothing(root):
    return None
def by_task(task, shift=0):
    x, y = load(None)
    return x + shift, y
"""


@pytest.fixture
def folder(tmp_path: Path) -> Any:
    """Yield a folder with a file of functions, forgotten afterwards."""
    (tmp_path / "data_of_user.py").write_text(MODULE)
    yield tmp_path
    sys.modules.pop("data_of_user", None)


def write(folder: Path, data: dict[str, Any], **sections: Any) -> Path:
    (folder / "c.yaml").write_text(yaml.safe_dump({**SPLIT, "data": data, **sections}))
    return folder / "c.yaml"


def test_a_function_by_its_dotted_path_is_kept_and_asks_for_trust(folder: Path) -> None:
    config = write(folder, {"source": "data_of_user.load", "root": "x", "rows": 80})
    whole = perdure.run(config)
    out = folder / "run"
    with pytest.raises(Killed):
        perdure.run(config, out=out, watch=kill_after(3))
    assert (out / "method" / "data_of_user.py").read_text() == MODULE
    sys.modules.pop("data_of_user")
    (folder / "data_of_user.py").unlink()
    with pytest.raises(UserError, match=r"data_of_user.load.*sha256.*trust=True"):
        perdure.resume(out)
    assert "data_of_user" not in sys.modules
    resumed = perdure.resume(out, trust=True)
    assert resumed.values["model_sha256"] == whole.values["model_sha256"]
    card = json.loads((out / "model" / "card.json").read_text())
    assert list(card["code"]) == ["method/data_of_user.py"]
    sys.modules.pop("data_of_user", None)
    assert perdure.load(out).predict(X).shape == (120,)  # needs no data, so no trust
    assert "data_of_user" not in sys.modules


def test_a_function_of_task_by_its_dotted_path(folder: Path, capsys: Any) -> None:
    stream = {"kind": "given", "tasks": 2}
    config = write(folder, {"source": "data_of_user.by_task", "shift": 1}, stream=stream)
    assert perdure.run(config).values["tasks"] == 2
    assert main(["check", str(config)]) == 0
    assert "2 tasks over 4 classes" in capsys.readouterr().out.replace("\n", " ")


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (
            {"source": "data_of_user.missing"},
            "data.source: must be a function that can be imported",
        ),
        ({"source": "data_of_user.broken", "root": 1}, "(OSError: no such disk), got 'data_of"),
        (
            {"source": "data_of_user.load"},
            "a function that returns data (TypeError: load() missing",
        ),
        ({"source": "data_of_user.nothing", "root": 1}, "a function that returns a tuple (x, y)"),
        ({"source": "data_of_user.np", "root": 1}, "data.source: must be a function that returns"),
        ({"source": "data_of_user.by_task"}, "stream.kind: must be 'given' for a function of task"),
        ({"source": "missing"}, " or a dotted path to a function, got 'missing'"),
        ({"source": "given:tuple-0"}, "data.source: must be given again in Python"),
    ],
)
def test_mistakes_exit_with_2_and_write_nothing(
    folder: Path, data: dict[str, Any], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write(folder, data)
    assert main(["run", str(config), "--out", str(folder / "run"), "-q"]) == 2
    assert sentence in capsys.readouterr().err.replace("\n", " ")
    assert not (folder / "run").exists()


@pytest.mark.parametrize(
    ("config", "data", "sentence"),
    [
        ({"data": {"source": "npz", "path": "a"}}, (X, NAMES), r"^data.source: must be omitted"),
        ({"data": {"pth": "a"}}, (X, NAMES), r"^data.pth: must be a key of data"),
        ({}, lambda x: x, r"^data: must be .*or a function of task, got '<lambda>'"),
        ({}, X, r"^data: must be a tuple"),
        (
            {"stream": {"kind": "split"}},
            [(X, NAMES)],
            r"^stream.kind: must be 'domains' or 'given'",
        ),
        ({"stream": {"kind": "given"}}, None, r"^stream.kind: must be permuted, split, domains"),
        ({}, (X[:4], ["a"] * 4), r"^data: must have examples of two classes or more, got only 'a'"),
    ],
)
def test_what_cannot_be_run_is_one_sentence(
    tmp_path: Path, config: dict[str, Any], data: Any, sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence):
        perdure.run(BASE | config, data=data, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_dataset_runs_with_a_config_object() -> None:
    data = TensorDataset(torch.from_numpy(X), torch.from_numpy(NUMBERS))
    config = perdure.Config.model_validate(SPLIT)
    assert perdure.run(config, data=data).values["tasks"] == 2
