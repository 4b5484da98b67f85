"""Run directories of version 0.1: read as they are, not resumed.

They were made by perdure 0.1: `combined` is a finished run of FedProTIP with SPECIAL-C, `stopped`
one of FOT that was stopped in its second task.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

import perdure
from perdure.cli.main import main
from perdure.report.run_records import read_runs

RUNS = Path(__file__).parent / "first_edition"
PREDICTED = [2, 7, 2, 2, 6, 6, 2, 7, 2, 6, 2, 2, 9, 2, 2, 9, 9, 2, 2, 2]
"""What 0.1 predicted for the images below, routed by FedProTIP."""


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


def test_a_model_of_0_1_predicts_the_same_classes() -> None:
    images = np.random.default_rng(0).integers(0, 17, (20, 8, 8), dtype=np.uint8) * 15
    assert perdure.load(RUNS / "combined").predict(images.astype(np.uint8)).tolist() == PREDICTED


def test_a_finished_run_is_reported(tmp_path: Path) -> None:
    runs = read_runs([RUNS / "combined"])
    assert len(runs.groups) == 1
    assert main(["report", str(RUNS / "combined"), "--html", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").stat().st_size > 10_000


def test_a_finished_run_stays_finished(tmp_path: Path) -> None:
    shutil.copytree(RUNS / "combined", tmp_path / "run")
    assert main(["watch", str(tmp_path / "run"), "--once"]) == 0


def test_a_stopped_run_is_not_resumed_and_not_touched(tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(RUNS / "stopped", run)
    before = contents(run)
    with pytest.raises(perdure.UserError, match="must be of format 2, got format 1"):
        perdure.resume(run)
    assert contents(run) == before
    assert main(["run", str(run / "config.yaml"), "--out", str(run), "--resume"]) == 2
    assert contents(run) == before
