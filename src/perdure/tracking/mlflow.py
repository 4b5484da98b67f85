"""MLflow: one run there for each run here, in the experiment `perdure`."""

from __future__ import annotations

import importlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from perdure.config import Config
from perdure.core.errors import bad_value
from perdure.core.files import write_atomic
from perdure.core.optional import require
from perdure.runs.directory import flatten_keys

EXPERIMENT = "perdure"
_STATUS = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}
_RETRIES = "MLFLOW_HTTP_REQUEST_MAX_RETRIES"
_PARAMS_AT_A_TIME, _LONGEST = 100, 500


def check_mlflow(place: bool | str) -> None:
    """Refuse where the extra is missing or the tracking server does not answer."""
    client = _client(place)
    try:
        with _impatient():
            client.search_experiments(max_results=1)
    except Exception as error:  # MLflow's own, and those of any database or network
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise bad_value("runs.mlflow", place, f"a tracking URI that answers ({reason})") from None


@contextmanager
def _impatient() -> Iterator[None]:
    """One more try instead of MLflow's seven, which take minutes, unless the user says how many."""
    if _RETRIES in os.environ:
        yield
        return
    os.environ[_RETRIES] = "1"
    try:
        yield
    finally:
        del os.environ[_RETRIES]


class MlflowTracker:
    """Logs each point once, also when a run comes to a round again after a kill."""

    def __init__(self, config: Config, folder: Path) -> None:
        self._client = _client(config.runs.mlflow)
        self._run = self._reopened(folder) or self._created(config, folder)
        keys = self._client.get_run(self._run).data.metrics
        self._there = {key: self._steps(key) for key in keys}

    def write(self, step: int, values: dict[str, float]) -> None:
        """The values that are not there yet."""
        now, metric = int(time.time() * 1000), importlib.import_module("mlflow.entities").Metric
        fresh = {k: v for k, v in values.items() if step not in self._there.get(k, ())}
        if fresh:
            points = [metric(key, value, now, step) for key, value in fresh.items()]
            self._client.log_batch(self._run, metrics=points)

    def close(self, outcome: str) -> None:
        """Say how the run ended; a resumed one opens it again."""
        self._client.set_terminated(self._run, status=_STATUS[outcome])

    def _reopened(self, folder: Path) -> str | None:
        try:
            run: str = json.loads((folder / "mlflow.json").read_text(encoding="utf-8"))["run_id"]
        except (OSError, ValueError):
            return None
        self._client.update_run(run, status="RUNNING")
        return run

    def _created(self, config: Config, folder: Path) -> str:
        found = self._client.get_experiment_by_name(EXPERIMENT)
        experiment = found.experiment_id if found else self._client.create_experiment(EXPERIMENT)
        run: str = self._client.create_run(experiment, run_name=folder.resolve().name).info.run_id
        param = importlib.import_module("mlflow.entities").Param
        values = flatten_keys(config.model_dump(mode="json", exclude={"runs"}))
        params = [param(key, str(value)[:_LONGEST]) for key, value in values.items()]
        for start in range(0, len(params), _PARAMS_AT_A_TIME):
            self._client.log_batch(run, params=params[start : start + _PARAMS_AT_A_TIME])
        write_atomic(folder / "mlflow.json", (json.dumps({"run_id": run}) + "\n").encode())
        return run

    def _steps(self, key: str) -> set[int]:
        return {point.step for point in self._client.get_metric_history(self._run, key)}


def _client(place: bool | str) -> Any:
    """True: where MLflow itself looks (MLFLOW_TRACKING_URI); text: a tracking URI."""
    client = require("mlflow", "runs.mlflow", "mlflow").MlflowClient
    try:
        return client() if place is True else client(tracking_uri=place)
    except Exception as error:  # as in check_mlflow
        reason = str(error).splitlines()[0]
        raise bad_value("runs.mlflow", place, f"a tracking URI ({reason})") from None
