"""Run directories of earlier versions left choices to their method: null in config.yaml."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

import perdure
from perdure.config import LEFT_TO_METHOD, parse, read_saved
from perdure.core.errors import UserError
from perdure.methods import KINDS
from perdure.runs.directory import RunDirectory
from perdure.training.open_settings import OPEN_SETTINGS

SMALL: dict[str, Any] = {
    "data": {"limit": 60},
    "stream": {"kind": "split", "tasks": 2, "classes_per_task": 2},
    "clients": {"count": 2},
    "model": {"hidden": [4]},
    "train": {"rounds": 1, "max_steps": 1},
    "engine": {"kind": "serial"},
    "runs": {"report": False},
}


def chosen(method: dict[str, Any], **sections: Any) -> tuple[Any, ...]:
    saved = read_saved(parse({**SMALL, **sections, "method": method}).model_dump(mode="json"))
    train = saved.train
    return (saved.model.head, train.outputs, train.weighting, train.server_lr,
            train.server_schedule)  # fmt: skip


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ({"kind": "fedavg"}, ("shared", "all", "samples", 1.0, "constant")),
        ({"kind": "fot"}, ("growing", "task", "uniform", 1.0, "constant")),
        ({"kind": "special"}, ("shared", "all", "uniform", 1.0, "1/k")),
        ({"kind": "pip"}, ("shared", "task", "samples", 1.0, "constant")),
        ({"kind": "pip", "weighted": False}, ("shared", "task", "uniform", 1.0, "constant")),
        ({"kind": "fedadam"}, ("shared", "all", "samples", 0.03, "constant")),
        (
            {"kind": "fedprotip", "with": [{"kind": "special"}]},
            ("growing", "task", "uniform", 1.0, "1/k"),
        ),
    ],
)
def test_what_a_method_chose_in_version_0_3(method: dict[str, Any], expected: Any) -> None:
    assert chosen(method) == expected


def test_heads_grew_on_split_streams_alone() -> None:
    found = chosen({"kind": "fot"}, stream={"kind": "permuted", "tasks": 2})
    assert found[:3] == ("shared", "all", "uniform")


def test_what_a_config_states_is_kept() -> None:
    model = {"hidden": [4], "head": "shared"}
    assert chosen({"kind": "fot"}, model=model)[:2] == ("shared", "all")


def test_a_custom_method_is_left_open() -> None:
    assert chosen({"kind": "elsewhere.Method"}) == (None,) * 5


def test_the_keys_are_those_that_a_run_fills() -> None:
    assert list(LEFT_TO_METHOD) == [setting.key for setting in OPEN_SETTINGS]
    assert {"fedavg", "fot", "fedprotip", "pip", "stamp", "special"} <= set(KINDS)


class _Stop(Exception):
    pass


def test_a_run_that_left_its_head_open_is_resumed_exactly(tmp_path: Path) -> None:
    """With all that 0.3 chose for FOT."""
    model = {"hidden": [4], "head": "growing"}
    train = {**SMALL["train"], "outputs": "task", "weighting": "uniform"}
    values = {**SMALL, "model": model, "train": train, "method": {"kind": "fot"}}
    whole = perdure.run(values)

    def stop(state: Any, event: Any) -> None:
        raise _Stop

    with pytest.raises(_Stop):
        perdure.run(values, out=tmp_path / "run", watch=stop)
    file = tmp_path / "run" / "config.yaml"
    saved = yaml.safe_load(file.read_text(encoding="utf-8"))
    for key in LEFT_TO_METHOD:
        section, name = key.split(".")
        assert saved[section][name] is not None
        saved[section][name] = None
    file.write_text(yaml.safe_dump(saved), encoding="utf-8")
    result = perdure.resume(tmp_path / "run")
    assert result.values["model_sha256"] == whole.values["model_sha256"]
    assert RunDirectory.open(tmp_path / "run").config().model.head == "growing"


def test_another_head_than_that_of_the_run_is_refused(tmp_path: Path) -> None:
    perdure.run({**SMALL, "method": {"kind": "fot"}}, out=tmp_path / "run")
    other = {**SMALL, "model": {"hidden": [4], "head": "growing"}, "method": {"kind": "fot"}}
    with pytest.raises(UserError, match="must be 'shared' as in"):
        perdure.run(other, out=tmp_path / "run", resume=True)
