"""Values of a run as TensorBoard and MLflow read them, also after a resume."""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from perdure.core.errors import UserError
from perdure.runs.run import run
from perdure.runs.tracking import Tracking
from perdure.runs.tracking.mlflow import check_mlflow

TINY: dict[str, Any] = {
    "data": {"limit": 120},
    "stream": {"tasks": 2},
    "clients": {"count": 3},
    "model": {"hidden": [8]},
    "train": {"rounds": 2},
    "engine": {"kind": "serial"},
}


class _Stop(Exception):
    pass


def _stopped_and_resumed(config: dict[str, Any], out: Path) -> Any:
    """A run that dies after its third round, when its second checkpoint's future is lost."""

    def stop(state: Any, event: dict[str, Any]) -> None:
        if state.counters.rounds == 3:
            raise _Stop

    with pytest.raises(_Stop):
        run(config, out=out, watch=stop)
    shutil.rmtree(out / "checkpoints/tasks")
    for path in sorted((out / "checkpoints").iterdir())[1:]:
        path.unlink()  # as if it had died before writing it: rounds come again
    return run(config, out=out, resume=True)


def test_tensorboard_has_every_value_once(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    config = {**TINY, "runs": {"tensorboard": True, "report": False, "keep_checkpoints": 3}}
    result = _stopped_and_resumed(config, tmp_path / "x")
    found = accumulator.EventAccumulator(str(tmp_path / "x" / "tensorboard"))
    found.Reload()
    assert [point.step for point in found.Scalars("lr")] == [1, 2, 3, 4]
    means = found.Scalars("task_agnostic/mean")
    assert [point.step for point in means] == [2, 4]
    acc = result.metrics["task_agnostic"]["ACC"]
    assert means[-1].value == pytest.approx(acc, abs=1e-6)
    assert found.Scalars("bytes/up")[-1].value == result.values["bytes"]["up"]


@pytest.mark.slow
def test_mlflow_has_every_value_once_in_one_run(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    place = f"sqlite:///{(tmp_path / 'mlflow.db').as_posix()}"
    config = {**TINY, "runs": {"mlflow": place, "report": False, "keep_checkpoints": 3}}
    result = _stopped_and_resumed(config, tmp_path / "x")
    client = mlflow.MlflowClient(tracking_uri=place)
    experiment = client.get_experiment_by_name("perdure").experiment_id
    (found,) = client.search_runs([experiment])
    assert found.info.status == "FINISHED"
    assert found.info.run_name == "x"
    assert found.data.params["train.rounds"] == "2"
    acc = result.metrics["task_agnostic"]["ACC"]
    assert found.data.metrics["task_agnostic/mean"] == pytest.approx(acc)
    for key, steps in (("lr", [1, 2, 3, 4]), ("task_agnostic/mean", [2, 4])):
        history = Counter(p.step for p in client.get_metric_history(found.info.run_id, key))
        assert history == Counter(steps)


@pytest.mark.parametrize(
    ("runs", "module"), [({"tensorboard": True}, "tensorboard"), ({"mlflow": True}, "mlflow")]
)
def test_a_missing_extra_is_refused_before_training(
    runs: dict[str, Any], module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(
        UserError, match=rf"runs\.{module}: requires pip install 'perdure\[{module}\]'$"
    ):
        run({**TINY, "runs": runs}, out=tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_an_invalid_tracking_uri_is_refused_before_training(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    with pytest.raises(UserError, match=r"runs\.mlflow: must be .*, got 'nonsense://x'"):
        run({**TINY, "runs": {"mlflow": "nonsense://x"}}, out=tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_a_server_that_does_not_answer_is_refused_after_one_retry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """MLflow reads the number of retries from the environment, where the user may set it."""
    seen: list[str | None] = []

    class Deaf:
        def search_experiments(self, max_results: int) -> None:
            seen.append(os.environ.get("MLFLOW_HTTP_REQUEST_MAX_RETRIES"))
            raise ConnectionError("refused")

    monkeypatch.setattr("perdure.runs.tracking.mlflow.mlflow_client", lambda place: Deaf())
    for retries in (None, "4"):
        if retries:
            monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", retries)
        with pytest.raises(UserError, match=r"runs\.mlflow: must be .*\(refused\), got 'http://x'"):
            check_mlflow("http://x")
        assert os.environ.get("MLFLOW_HTTP_REQUEST_MAX_RETRIES") == retries
    assert seen == ["1", "4"]


def test_a_tracker_that_fails_does_not_end_the_run(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        calls = 0

        def write(self, step: int, values: dict[str, float]) -> None:
            self.calls += 1
            raise OSError("the disk is full")

        def close(self, outcome: str) -> None:
            raise OSError("still full")

    broken = Broken()
    opened = Tracking([broken])
    event = {"event": "round", "bytes": {"up": 1, "down": 1}}
    with caplog.at_level(logging.WARNING):
        opened.log(event)
        opened.log(event)
        opened.close("finished")
    assert broken.calls == 1
    assert "the disk is full" in caplog.text
