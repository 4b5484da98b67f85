"""A learner in Python, runs as initial weights, and the format of run directories."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import perdure
from perdure.algebra.subspaces import Subspace
from perdure.core.errors import UserError
from perdure.runs import checkpoint

CONFIG: dict[str, Any] = {
    "model": {"hidden": [8], "head": "shared"},
    "clients": {"count": 2},
    "train": {"rounds": 1, "max_steps": 3},
    "engine": {"kind": "serial"},
    "runs": {"report": False},
}


def examples(seed: int, names: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    labels = np.arange(80) % len(names)
    return rng.normal(labels[:, None], 0.3, (80, 4)).astype(np.float32), np.array(names)[labels]


def test_a_learner_learns_arrays(tmp_path: Path) -> None:
    first, second = examples(0, ("a", "b")), examples(1, ("b", "c"))
    stream = {"kind": "split", "tasks": 1, "classes_per_task": 2}
    result = perdure.run({**CONFIG, "stream": stream}, out=tmp_path / "run", data=first)
    learner = perdure.Learner(result, data=first)
    assert repr(learner).endswith("1 tasks)")
    learner.learn(second, rounds=2)
    third = examples(2, ("d", "a"))
    result = learner.learn(third, settings={"train.lr": 0.02})
    assert learner.model.class_names == ("a", "b", "c", "d")
    assert len(learner.evaluate()["task_agnostic"] or ()) == 3
    assert learner.predict(third[0]).shape == (80,)
    assert learner.result.values == result.values
    assert learner.report().is_file()
    with pytest.raises(UserError, match="given"):
        perdure.extend(tmp_path / "run", data=second)
    again = perdure.resume(tmp_path / "run", data=first, given=[second, third])
    assert again.values["model_sha256"] == result.values["model_sha256"]


def test_a_result_without_a_run_directory() -> None:
    result = perdure.run({**CONFIG, "stream": {"tasks": 1}})
    with pytest.raises(UserError, match="got a result that was not written"):
        perdure.Learner(result)


def test_a_run_is_a_start_of_another(tmp_path: Path) -> None:
    values = {**CONFIG, "method": {"kind": "fot"}, "stream": {"tasks": 2}}
    perdure.run(values, out=tmp_path / "first")
    model = {**values["model"], "init": str(tmp_path / "first")}
    small = {**values["train"], "lr": 1e-9}
    perdure.run({**values, "model": model, "train": small}, out=tmp_path / "second")
    trees = [
        checkpoint.latest(tmp_path / name / "checkpoints/tasks")[1]["state"]["server"]  # type: ignore[index]
        for name in ("first", "second")
    ]
    for name, value in trees[0]["params"].items():
        np.testing.assert_allclose(value, trees[1]["params"][name], atol=1e-5)
    first, second = (tree["state"]["spaces"] for tree in trees)
    for name, space in first.items():
        ranks = [Subspace.from_tree(each).rank for each in (space, second[name])]
        assert 0 < ranks[0] <= ranks[1]


def test_a_run_says_its_format(tmp_path: Path) -> None:
    perdure.run({**CONFIG, "stream": {"tasks": 1}}, out=tmp_path / "run")
    path = tmp_path / "run/config.yaml"
    values = yaml.safe_load(path.read_text())
    assert values["format"] == 1
    for found in (0, 2, "one", None):
        path.write_text(yaml.safe_dump({**values, "format": found}))
        with pytest.raises(UserError, match=f"format: must be 1, got {found!r}; use the version"):
            perdure.extend(tmp_path / "run", tasks=1)
        with pytest.raises(UserError, match="format: must be 1"):
            perdure.run(path)
    del values["format"]
    path.write_text(yaml.safe_dump(values))
    with pytest.raises(UserError, match="format: must be 1, got None"):
        perdure.extend(tmp_path / "run", tasks=1)
    perdure.run(path)  # a config of a user states none


def test_a_checkpoint_of_another_format_is_refused(tmp_path: Path) -> None:
    perdure.run({**CONFIG, "stream": {"tasks": 1}}, out=tmp_path / "run")
    folder = tmp_path / "run/checkpoints"
    newest, tree = checkpoint.latest(folder)  # type: ignore[misc]
    for path in folder.rglob("*.safetensors"):
        path.unlink()
    assert tree["format"] == 1
    number = int(newest.name.partition("-")[0])
    for changed in ({**tree, "format": 2}, {k: v for k, v in tree.items() if k != "format"}):
        checkpoint.save(folder, number, changed)
        with pytest.raises(UserError, match="format: must be 1, got "):
            perdure.resume(tmp_path / "run")
