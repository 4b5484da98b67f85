"""MLflow: one MLflow run per run directory, in the MLflow experiment `perdure`."""

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
from perdure.config.sentences import flatten_keys
from perdure.core.documents import json_value
from perdure.core.errors import bad_value
from perdure.core.files import write_atomic
from perdure.core.registry import require

EXPERIMENT = "perdure"
_STATUS = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}
_RETRIES = "MLFLOW_HTTP_REQUEST_MAX_RETRIES"
_PARAMS_PER_REQUEST, _MAX_PARAM_LENGTH = 100, 500


def check_mlflow(uri: bool | str) -> None:
    """Refuse `runs.mlflow` if the extra is not installed or the server does not answer."""
    client = mlflow_client(uri)
    try:
        with _one_retry():
            client.search_experiments(max_results=1)
    except Exception as error:  # of MLflow, a database or the network
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise bad_value("runs.mlflow", uri, f"a tracking URI that answers ({reason})") from None


@contextmanager
def _one_retry() -> Iterator[None]:
    """Retry once instead of MLflow's seven times, unless the environment sets a number."""
    if _RETRIES in os.environ:
        yield
        return
    os.environ[_RETRIES] = "1"
    try:
        yield
    finally:
        del os.environ[_RETRIES]


class MlflowTracker:
    """Logs every value once, also if a resumed run repeats a round."""

    def __init__(self, config: Config, folder: Path) -> None:
        self._client = mlflow_client(config.runs.mlflow)
        self._run = self.reopen(folder) or self._create(config, folder)
        keys = self._client.get_run(self._run).data.metrics
        self._logged_steps = {key: self._steps(key) for key in keys}

    def write(self, step: int, values: dict[str, float]) -> None:
        """Log the values that are not logged yet."""
        now, metric = int(time.time() * 1000), importlib.import_module("mlflow.entities").Metric
        new = {k: v for k, v in values.items() if step not in self._logged_steps.get(k, ())}
        if new:
            metrics = [metric(key, value, now, step) for key, value in new.items()]
            self._client.log_batch(self._run, metrics=metrics)

    def close(self, outcome: str) -> None:
        """Set the status of the MLflow run; a resumed run reopens it."""
        self._client.set_terminated(self._run, status=_STATUS[outcome])

    def reopen(self, folder: Path) -> str | None:
        try:
            run: str = json_value((folder / "mlflow.json").read_bytes())["run_id"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        self._client.update_run(run, status="RUNNING")
        return run

    def _create(self, config: Config, folder: Path) -> str:
        existing = self._client.get_experiment_by_name(EXPERIMENT)
        if existing:
            experiment = existing.experiment_id
        else:
            experiment = self._client.create_experiment(EXPERIMENT)
        run: str = self._client.create_run(experiment, run_name=folder.resolve().name).info.run_id
        param = importlib.import_module("mlflow.entities").Param
        values = flatten_keys(config.model_dump(mode="json", exclude={"runs"}))
        params = [param(key, str(value)[:_MAX_PARAM_LENGTH]) for key, value in values.items()]
        for start in range(0, len(params), _PARAMS_PER_REQUEST):
            self._client.log_batch(run, params=params[start : start + _PARAMS_PER_REQUEST])
        write_atomic(folder / "mlflow.json", (json.dumps({"run_id": run}) + "\n").encode())
        return run

    def _steps(self, key: str) -> set[int]:
        return {point.step for point in self._client.get_metric_history(self._run, key)}


def mlflow_client(uri: bool | str) -> Any:
    """Return a client for a URI as in `check_mlflow`."""
    client = require("mlflow", "runs.mlflow", "mlflow").MlflowClient
    try:
        return client() if uri is True else client(tracking_uri=uri)
    except Exception as error:  # as in check_mlflow
        reason = str(error).splitlines()[0]
        raise bad_value("runs.mlflow", uri, f"a tracking URI ({reason})") from None
