"""Extended runs: three tasks extended by two are five tasks, bit for bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import perdure
from perdure.config import load_saved
from perdure.core.errors import UserError
from perdure.methods.registry import KINDS
from perdure.runs.directory import RunDirectory

PROMPTS = ("fed-l2p", "fed-dualp", "pip")
SMALL: dict[str, dict[str, Any]] = {
    "fedprotip": {"max_examples": 32, "max_columns": 32, "space_rank": 4},
    "gpm": {"max_examples": 32, "max_columns": 32},
    "ewc": {"samples": 8},
    "er": {"budget": 10, "replay_batch": 4},
    "stamp": {"budget": 2},
    "fed-l2p": {"length": 1, "pool": 2, "top": 1},
    "fed-dualp": {"length": 1, "pool": 2, "expert_layers": [2]},
    "pip": {"length": 1, "pool": 2, "expert_layers": [2]},
}
VIT = {"kind": "vit", "init": "random", "width": 8, "heads": 2, "depth": 3, "patch": 4}
TIMES = ("seconds", "peak_rss_mb")
SLOW_VECTOR, SLOW_GROWING = (
    pytest.param(name, marks=pytest.mark.slow) for name in ("vector", "growing")
)


def config(kind: str = "fedavg", engine: str = "serial", **sections: Any) -> dict[str, Any]:
    body = VIT if kind in PROMPTS else {"hidden": [8]}
    model = {**body, **sections.pop("model", {})}
    return {
        "data": {"limit": 150, "test_limit": 50},
        "stream": {"kind": "split", "tasks": 3, "classes_per_task": 2},
        "clients": {"count": 3},
        "model": model,
        "method": {"kind": kind, **SMALL.get(kind, {})},
        "train": {"rounds": 1, "max_steps": 2, "batch_size": 16},
        "engine": {"kind": engine},
        "runs": {"report": False},
        **sections,
    }


def of_five(values: dict[str, Any]) -> dict[str, Any]:
    return {**values, "stream": {**values["stream"], "tasks": 5}}


def outcome(run: Path) -> dict[str, Any]:
    """The result of a run without times."""
    result = json.loads((run / "result.json").read_text())
    return {key: value for key, value in result.items() if key not in TIMES}


def check_extension(values: dict[str, Any], folder: Path) -> None:
    perdure.run(values, out=folder / "extended")
    perdure.extend(folder / "extended", tasks=2)
    perdure.run(of_five(values), out=folder / "whole")
    assert outcome(folder / "extended") == outcome(folder / "whole")
    left, right = ((folder / n / "events.jsonl").read_text() for n in ("extended", "whole"))
    assert len(left.splitlines()) == len(right.splitlines())
    cards = [
        json.loads((folder / n / "model/card.json").read_text()) for n in ("extended", "whole")
    ]
    assert cards[0]["sha256"] == cards[1]["sha256"]
    assert cards[0]["outputs"]["task_classes"] == cards[1]["outputs"]["task_classes"]


@pytest.mark.parametrize("engine", ["serial", SLOW_VECTOR])
@pytest.mark.parametrize("kind", KINDS)
def test_a_shared_head_on_a_split_stream(kind: str, engine: str, tmp_path: Path) -> None:
    check_extension(config(kind, engine, model={"head": "shared"}), tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_a_growing_head_on_a_split_stream(kind: str, tmp_path: Path) -> None:
    check_extension(config(kind, model={"head": "growing"}), tmp_path)


@pytest.mark.parametrize(
    "stream",
    [
        {"kind": "permuted", "tasks": 3, "presence": 0.7},
        {"kind": "pool", "tasks": 3, "classes_per_task": 2},
        {"kind": "split", "tasks": 3, "classes_per_task": 3, "overlap": 2, "cumulative": True},
    ],
)
def test_other_streams(stream: dict[str, Any], tmp_path: Path) -> None:
    values = config("fedavg", stream=stream, clients={"count": 4, "per_round": 2})
    check_extension({**values, "data": {"limit": 300, "validation": 0.2}}, tmp_path)


def test_classes_per_task_stay_as_they_were(tmp_path: Path) -> None:
    """Four tasks of ten classes have two each; so have those that are added."""
    stream = {"kind": "split", "tasks": 4}
    perdure.run(config(stream=stream), out=tmp_path / "run")
    perdure.extend(tmp_path / "run", tasks=1)
    five = {"kind": "split", "tasks": 5, "classes_per_task": 2}
    whole = perdure.run(config(stream=five))
    assert outcome(tmp_path / "run")["model_sha256"] == whole.values["model_sha256"]
    before = (tmp_path / "run/config.yaml").read_bytes()
    with pytest.raises(UserError, match="classes"):
        perdure.extend(tmp_path / "run", tasks=1)
    assert (tmp_path / "run/config.yaml").read_bytes() == before


# ---- new data


def save_npz(path: Path, names: list[str], seed: int = 0, shape: tuple[int, ...] = (8, 8)) -> Path:
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 17, (60, *shape), dtype=np.uint8)
    y = np.array(names)[np.arange(60) % len(names)]
    np.savez(path, x_train=x, y_train=y, x_test=x, y_test=y)
    return path


@pytest.mark.parametrize("head", ["shared", SLOW_GROWING])
@pytest.mark.parametrize("kind", KINDS)
def test_new_classes(kind: str, head: str, tmp_path: Path) -> None:
    """A run that is extended equals one whose config had the extension from the start."""
    new = save_npz(tmp_path / "new.npz", ["a", "b", "7"])
    run = tmp_path / "run"
    first = perdure.run(config(kind, model={"head": head}), out=run)
    settings = {"train.lr": 0.02, "train.rounds": 2}
    result = perdure.extend(run, data=new, settings=settings)
    assert result.values["tasks"] == 4
    for mode, rows in first.matrix.items():
        assert rows is None or result.matrix[mode][2][:3] == rows[2]
    again = perdure.run(run / "config.yaml")
    assert again.values["model_sha256"] == result.values["model_sha256"]
    model = perdure.load(run)
    assert model.class_names == (*map(str, range(10)), "a", "b")
    with np.load(new) as arrays:
        predicted = model.predict(arrays["x_test"])
    assert predicted.shape == (60,)


def test_settings_hold_for_the_new_tasks_alone(tmp_path: Path) -> None:
    new = save_npz(tmp_path / "new.npz", ["a", "b"])
    perdure.run(config(), out=tmp_path / "run")
    perdure.extend(tmp_path / "run", data=new, settings={"train.lr": 0.02, "train.rounds": 2})
    perdure.extend(tmp_path / "run", tasks=1)
    events = [json.loads(line) for line in (tmp_path / "run/events.jsonl").open()]
    rounds = [(e["task"], e["lr"]) for e in events if e["event"] == "round"]
    lr = load_saved(tmp_path / "run/config.yaml").train.lr
    assert rounds == [(0, lr), (1, lr), (2, lr), (3, 0.02), (3, 0.02), (4, lr)]


def test_separate_labels_are_new_classes(tmp_path: Path) -> None:
    new = save_npz(tmp_path / "may.npz", ["0", "1"])
    perdure.run(config(), out=tmp_path / "run")
    perdure.extend(tmp_path / "run", data=new, labels="separate")
    assert perdure.load(tmp_path / "run").class_names[-2:] == ("may/0", "may/1")


def test_clients_join_and_leave(tmp_path: Path) -> None:
    perdure.run(config("scaffold"), out=tmp_path / "run")
    perdure.extend(tmp_path / "run", tasks=1, settings={"clients.count": 5})
    result = perdure.extend(tmp_path / "run", tasks=1, settings={"clients.count": 2})
    by_task = [task["per_client"]["clients"] for task in result.values["bytes"]["by_task"]]
    assert by_task == [3, 3, 3, 5, 2]


def save_table(path: Path, sites: list[str], seed: int) -> Path:
    rng = np.random.default_rng(seed)
    lines = ["a,b,site,label"]
    for row in range(60):
        label = row % 3
        a, b = rng.normal(label, 1, 2)
        lines.append(f"{a:.3f},{b:.3f},{sites[row % len(sites)]},kind {label}")
    path.write_text("\n".join(lines) + "\n")
    return path


def test_clients_of_new_data_join_by_name(tmp_path: Path) -> None:
    first = save_table(tmp_path / "may.csv", ["bern", "graz"], 0)
    later = save_table(tmp_path / "june.csv", ["aarau", "graz"], 1)
    values = config(
        data={"source": "table", "path": str(first)},
        stream={"kind": "split", "tasks": 1, "classes_per_task": 3},
        clients={"partition": {"kind": "column", "name": "site"}},
    )
    perdure.run(values, out=tmp_path / "run")
    result = perdure.extend(tmp_path / "run", data=later)
    assert result.values["clients"]["names"] == ["bern", "graz", "aarau"]
    rows = np.array(result.values["clients"]["rows"])
    assert (rows[:, 1] > 0).tolist() == [False, True, True]
    assert rows[2, 0] == 0


# ---- going back


def test_rewind_and_go_on(tmp_path: Path) -> None:
    values = of_five(config("fot"))
    whole = perdure.run(values, out=tmp_path / "run")
    shutil.copytree(tmp_path / "run", tmp_path / "kept")
    result = perdure.rewind(tmp_path / "run", task=3)
    assert result.values["tasks"] == 3
    three = perdure.run(config("fot"))
    assert result.values["model_sha256"] == three.values["model_sha256"]
    assert result.matrix == three.matrix
    assert perdure.load(tmp_path / "run").last_task == 2
    again = perdure.extend(tmp_path / "run", tasks=2)
    assert again.values["model_sha256"] == whole.values["model_sha256"]
    assert again.matrix == whole.matrix
    assert again.values["bytes"] == whole.values["bytes"]


def test_rewinding_forgets_what_came_after(tmp_path: Path) -> None:
    """Checkpoints of the tasks that were left behind are never resumed from."""
    new = save_npz(tmp_path / "new.npz", ["a", "b"])
    other = save_npz(tmp_path / "other.npz", ["a", "b"], seed=1)
    perdure.run(config("er"), out=tmp_path / "run")
    perdure.extend(tmp_path / "run", data=new)
    perdure.rewind(tmp_path / "run", task=3)
    result = perdure.extend(tmp_path / "run", data=other)
    perdure.run(config("er"), out=tmp_path / "straight")
    expected = perdure.extend(tmp_path / "straight", data=other)
    assert result.values["model_sha256"] == expected.values["model_sha256"]


def test_a_task_whose_checkpoint_is_gone(tmp_path: Path) -> None:
    perdure.run(of_five(config()), out=tmp_path / "run")
    with pytest.raises(UserError, match=r"^task: must be a task .* \(3, 4, 5\), got 2"):
        perdure.rewind(tmp_path / "run", task=2)


# ---- refusals, none of which changes anything


def refused(run: Path, match: str, **arguments: Any) -> None:
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file() and p.name != ".lock"}
    with pytest.raises(UserError, match=match):
        perdure.extend(run, **arguments)
    assert {p: p.read_bytes() for p in before} == before
    assert set(before) == {p for p in run.rglob("*") if p.is_file() and p.name != ".lock"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "run"
    perdure.run(config(), out=run)
    return run


def test_refusals(finished: Path, tmp_path: Path) -> None:
    wide = save_npz(tmp_path / "wide.npz", ["a", "b"], shape=(9, 9))
    refused(finished, "tasks: must be given, or data, got neither")
    refused(finished, "got both", tasks=1, data=wide)
    refused(
        finished, r"must be uint8 of shape \(1, 8, 8\) like the run, got .*\(1, 9, 9\)", data=wide
    )
    refused(finished, "which is not there", data=tmp_path / "nothing.npz")
    refused(finished, "settings: must be keys of train", tasks=1, settings={"method.kind": "fot"})
    refused(finished, r"settings: lr: must be .*, got -1", tasks=1, settings={"train.lr": -1})
    refused(finished, r"classes", tasks=3)


def test_a_run_that_is_running(finished: Path) -> None:
    with RunDirectory.reopen(finished):
        refused(finished, "in use by process", tasks=1)
