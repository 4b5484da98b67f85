"""Runs of version 0.3: resumed as they were started, or refused with a sentence.

`version_0_3/ewc` was made by perdure 0.3: EWC with its defaults, stopped after one of three tasks.
Beside it is the model that 0.3 trained without the stop.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

import perdure
from perdure.config import dump, parse, read_saved
from perdure.execution.result import result_values
from perdure.runs.directory import RunDirectory
from perdure.training.experiment import build_experiment
from perdure.training.open_settings import with_method_defaults

RUNS = Path(__file__).parent / "version_0_3"
SMALL: dict[str, Any] = {
    "data": {"limit": 60},
    "stream": {"kind": "split", "tasks": 2, "classes_per_task": 2},
    "clients": {"count": 2},
    "model": {"hidden": [4], "head": "shared"},
    "train": {"rounds": 1, "max_steps": 1},
    "engine": {"kind": "serial"},
    "runs": {"report": False},
}
GROWING = {"model": {"hidden": [4], "head": "growing"}}
CLASSES = {"clients": {"count": 2, "partition": {"kind": "classes"}}}
WITH_MOMENTUM = {"train": {**SMALL["train"], "momentum": 0.9}}


def as_of_0_3(folder: Path, method: dict[str, Any], **sections: Any) -> perdure.Config:
    """Write the config.yaml of a run, with the key that 0.3 always wrote; return the config."""
    config = with_method_defaults(parse({**SMALL, **sections, "method": method}))
    values = yaml.safe_load(dump(config))
    values["train"]["first_task_rounds"] = None
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    return config


def test_ewc_goes_on_with_an_anchor_for_each_task(tmp_path: Path) -> None:
    run = shutil.copytree(RUNS / "ewc", tmp_path / "run")
    assert RunDirectory.open(run).config().method["anchor"] == "each"
    perdure.resume(run)
    model, expected = load_file(run / "model/model.safetensors"), RUNS / "ewc-finished.safetensors"
    for name, value in load_file(expected).items():
        torch.testing.assert_close(model[name], value, atol=1e-6, rtol=1e-5)


def test_hyperparameters_of_combined_methods_are_filled_in() -> None:
    method = {"kind": "fedavgm", "with": [{"kind": "ewc", "lambda": 3.0}]}
    values = {"train": {"first_task_rounds": None}, "method": method}
    assert read_saved(values).method["with"] == [{"kind": "ewc", "lambda": 3.0, "anchor": "each"}]
    assert "anchor" not in read_saved({"method": method}).method["with"][0]


@pytest.mark.parametrize(
    ("method", "sections"),
    [
        ({"kind": "er"}, {}),
        ({"kind": "stamp"}, {}),
        ({"kind": "fedprotip"}, {}),
        ({"kind": "fedavgm", "with": [{"kind": "er"}]}, {}),
        ({"kind": "lwf"}, GROWING),
        ({"kind": "flwf-2t"}, GROWING),
        ({"kind": "calibrate", "head": "quadratic"}, {}),
        ({"kind": "ewc", "step": "implicit"}, WITH_MOMENTUM),
    ],
)
def test_a_method_that_was_corrected_is_not_resumed(
    method: dict[str, Any], sections: dict[str, Any], tmp_path: Path
) -> None:
    config = as_of_0_3(tmp_path, method, **sections)
    kind = (method.get("with") or [method])[-1]["kind"]
    with pytest.raises(perdure.UserError, match=f"since {kind} computes other results than in 0.3"):
        RunDirectory.check_can_create(tmp_path, config, resume=True)


def test_other_classes_of_clients_are_refused(tmp_path: Path) -> None:
    config = as_of_0_3(tmp_path, {"kind": "fedavg"}, **CLASSES)
    with pytest.raises(perdure.UserError, match=r"clients\.partition"):
        RunDirectory.check_can_create(tmp_path, config, resume=True)


@pytest.mark.parametrize(
    ("method", "sections"),
    [
        ({"kind": "lwf"}, {}),
        ({"kind": "flwf-2t"}, {}),
        ({"kind": "calibrate"}, {}),
        ({"kind": "ewc", "anchor": "each", "step": "implicit"}, {}),
        ({"kind": "ewc", "anchor": "each", "step": "gradient"}, WITH_MOMENTUM),
    ],
)
def test_what_computes_the_same_is_resumed(
    method: dict[str, Any], sections: dict[str, Any], tmp_path: Path
) -> None:
    config = as_of_0_3(tmp_path, method, **sections)
    RunDirectory.check_can_create(tmp_path, config, resume=True)


def test_runs_of_this_version_are_resumed(tmp_path: Path) -> None:
    perdure.run({**SMALL, "method": {"kind": "er"}}, out=tmp_path / "run")
    perdure.resume(tmp_path / "run")


def test_routed_accuracies_of_the_first_tasks_alone_do_not_count() -> None:
    """0.3 recorded them where all tasks have the same outputs; a task later there are none."""
    experiment = build_experiment(parse({**SMALL, "method": {"kind": "fedavg"}}))
    state = experiment.initial_state()
    rows = [[0.5, None], [0.25, 0.75]]
    state.matrix = {mode: rows for mode in state.matrix} | {"routed": [[0.5, None], [None, None]]}
    values = result_values(experiment, state)
    assert values["matrix"]["routed"] is values["metrics"]["routed"] is None
    assert values["metrics"]["task_agnostic"]["ACC"] == 0.5
