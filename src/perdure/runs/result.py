"""The result of a run, which is the content of result.json."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from perdure.core.errors import bad_value
from perdure.core.files import sha256
from perdure.core.notebook import html_table
from perdure.core.registry import require
from perdure.core.trees import Tensors
from perdure.core.version import __version__
from perdure.data.streams.build import client_rows
from perdure.evaluation.evaluator import MODES
from perdure.evaluation.forgetting import Matrix, forgetting_by_task, metrics
from perdure.evaluation.metrics import MAIN, Metric, definition
from perdure.report.matplotlib_charts import figures
from perdure.runs.records import read_runs
from perdure.training.experiment import Experiment
from perdure.training.ledger import encode
from perdure.training.privacy import origin_of_draws, privacy_summary
from perdure.training.state import RunState

if TYPE_CHECKING:
    from perdure.report.matplotlib_charts import Drawings


# ---- Peak memory of the current process


def peak_memory_mb() -> float | None:
    """Return the largest resident memory of this process so far in MB, or None if unknown."""
    with contextlib.suppress(OSError):  # Linux; getrusage would count the parent before exec too
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    try:
        resource = importlib.import_module("resource")
    except ImportError:
        return None
    peak: int = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1 << 20 if sys.platform == "darwin" else 1 << 10)


# ---- A result in a notebook: one line, a table as HTML, and a data frame

_SHOWN = ("ACC", "FGT", "learned", "Avg")
Values = dict[str, Any]
"""The content of result.json."""


def result_line(values: Values, path: object) -> str:
    """Return what a result is and its main numbers, in one line."""
    mode = "routed" if values["metrics"]["routed"] else "task_agnostic"
    metrics = values["metrics"][mode]
    numbers = " ".join(f"{name} {_number(metrics[name])}" for name in ("ACC", "FGT"))
    where = f", {path}" if path is not None else ""
    tasks = f"{values['tasks']} task{'s' if values['tasks'] != 1 else ''}"
    return f"{values['method']}, seed {values['seed']}, {tasks}, {mode} {numbers}{where}"


def result_html(values: Values, path: object) -> str:
    """Return a table of the main metrics by inference mode."""
    scores = values["scores"] or {}
    main = values["measure"]
    others = [name for name in scores if name != main]
    rows = [
        [mode, *(_number(metrics[name]) for name in _SHOWN),
         *(_number(_last_mean(scores[name][mode])) for name in others)]
        for mode, metrics in values["metrics"].items() if metrics
    ]  # fmt: skip
    return html_table(result_line(values, path), ["", *_SHOWN, *others], rows)


def result_frame(values: Values) -> Any:
    """Return the matrices as a data frame with one row per mode, task trained and task tested."""
    pandas = require("pandas", "to_frame", "notebook")
    scores = values["scores"] or {}
    matrices = {values["measure"]: values["matrix"], **scores}
    rows = [
        {"mode": mode, "after": i, "task": j,
         **{name: by_mode[mode][i][j] for name, by_mode in matrices.items()}}
        for mode, matrix in values["matrix"].items() if matrix
        for i in range(len(matrix)) for j in range(i + 1)
    ]  # fmt: skip
    return pandas.DataFrame(rows, columns=["mode", "after", "task", *matrices])


def _last_mean(matrix: list[list[float | None]]) -> float | None:
    known = [value for value in matrix[-1] if value is not None]
    return sum(known) / len(known) if len(known) == len(matrix[-1]) else None


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


# ---- The result of a run, which is the content of result.json


@dataclass(frozen=True, repr=False)
class Result:
    """The result of a run. A notebook shows it as a table."""

    values: dict[str, Any]
    """The content of result.json."""
    path: Path | None
    """The run directory. None if nothing was written."""

    @property
    def matrix(self) -> dict[str, Any]:
        """Accuracies: `matrix[mode][i][j]` is the accuracy (0 to 1; or R2) on task j after task i.

        Both count from 0; None for j > i. `mode` is "task_agnostic", "task_aware" or "routed",
        whose matrix is None if the method cannot route.
        """
        matrix: dict[str, Any] = self.values["matrix"]
        return matrix

    @property
    def metrics(self) -> dict[str, Any]:
        """Accuracy and forgetting: `metrics[mode][name]`, such as `metrics["task_aware"]["ACC"]`.

        `perdure.evaluation.forgetting.DEFINITIONS` defines the names.
        """
        values: dict[str, Any] = self.values["metrics"]
        return values

    @property
    def scores(self) -> dict[str, Any]:
        """Matrices of `evaluate.metrics`: `scores[metric][mode][i][j]`, shaped like `matrix`.

        Empty if only accuracy was asked for.
        """
        return self.values["scores"] or {}

    @property
    def measure(self) -> str:
        """What `matrix` and `metrics` hold: "accuracy", or "r2" if numbers are predicted."""
        measure: str = self.values["measure"]
        return measure

    def to_frame(self) -> Any:
        """Return the matrices as a pandas DataFrame.

        It has one row per mode, `task` (tested) and `after` (the last task trained), both from 0,
        and one column per metric.

        Raises:
            UserError: pandas is not installed.

        """
        return result_frame(self.values)

    def figures(self, out: str | Path | None = None, formats: Sequence[str] = ("png",)) -> Drawings:
        """Draw the figures of the run; see `perdure.report.figures`.

        Args:
            out: Directory to save image files in. If None, nothing is saved.
            formats: Formats of the files: png, svg or pdf.

        Raises:
            UserError: The run has no directory, whose events are drawn.

        """
        if self.path is None:
            raise bad_value("out", None, "a run directory for figures, as in run(config, out=...)")
        return figures(read_runs([self.path]), out, formats)

    def __repr__(self) -> str:
        return f"Result({result_line(self.values, self.path)})"

    def _repr_html_(self) -> str:
        return result_html(self.values, self.path)


def result_values(experiment: Experiment, state: RunState) -> dict[str, Any]:
    """Return the content of result.json."""
    accuracies = _accuracies(state.matrix)
    names = experiment.stream.class_names
    learned = [experiment.task(number) for number in range(state.task)]
    return {
        "perdure": __version__,
        "method": experiment.config.method["kind"],
        "seed": experiment.config.seed,
        "tasks": experiment.task_count,
        "engine": experiment.engine.name,
        "chunk": experiment.engine.choice().get("chunk"),
        **accuracies,
        "validation": _accuracies(state.validation) if state.validation["task_agnostic"] else None,
        "measure": MAIN[experiment.config.data.target],
        "scores": _scores(state) if state.scores else None,
        "score_metrics": _score_metrics(experiment, state) if state.scores else None,
        "score_definitions": {n: definition(m) for n, m in experiment.metrics.items()} or None,
        "client_scores": state.client_scores or None,
        **({"client_tests": state.client_tests} if state.client_tests else {}),
        "routing": state.routing if state.confusion else None,
        "confusion": state.confusion,
        "task_names": [task.name for task in learned],
        "task_classes": [[names[label] for label in task.classes] for task in learned],
        "clients": client_rows(experiment.stream, state.task),
        "bytes": state.ledger.summary(),
        "seconds": _seconds(state),
        "rounds": state.counters.rounds,
        "client_updates": state.counters.client_updates,
        "rejected_updates": state.counters.rejected,
        "missing_reports": state.counters.missing,
        "failures": state.counters.failures,
        "participation": state.counters.participation or None,
        "repeated_rounds": state.counters.repeated,
        "warnings": state.counters.warnings,
        "privacy": privacy_summary(experiment, state),
        "draws": origin_of_draws(experiment),
        "threads": torch.get_num_threads(),
        "peak_rss_mb": peak_memory_mb(),
        "model_sha256": model_hash(state.server.params | state.server.buffers),
    }


def _accuracies(matrices: dict[str, Matrix]) -> dict[str, dict[str, Any]]:
    """Return `matrix`, `metrics` and `forgetting` by mode; None for a mode without accuracies."""
    known = {m: rows for m, rows in matrices.items() if rows and rows[0][0] is not None}
    return {
        "matrix": {mode: known.get(mode) for mode in MODES},
        "metrics": {mode: metrics(known[mode]) if mode in known else None for mode in MODES},
        "forgetting": {m: forgetting_by_task(known[m]) if m in known else None for m in MODES},
    }


def _scores(state: RunState) -> dict[str, dict[str, Matrix | None]]:
    """Return the matrix of every metric by mode; None for a mode without accuracies."""
    known = {mode for mode, rows in state.matrix.items() if rows and rows[0][0] is not None}
    return {
        name: {mode: matrices[mode] if mode in known else None for mode in MODES}
        for name, matrices in state.scores.items()
    }


def _score_metrics(experiment: Experiment, state: RunState) -> dict[str, dict[str, Any]]:
    """Return what `metrics` has for accuracy, of every metric by mode."""
    return {
        name: {m: _metrics_or_none(rows, experiment.metrics[name]) for m, rows in by_mode.items()}
        for name, by_mode in _scores(state).items()
    }


def _metrics_or_none(matrix: Matrix | None, metric: Metric) -> dict[str, float | None] | None:
    """Return the metrics of a matrix, or None if it is missing or has values not defined."""
    if matrix is None or any(None in row[: i + 1] for i, row in enumerate(matrix)):
        return None
    return metrics(matrix, metric.lower_is_better)


def _seconds(state: RunState) -> dict[str, Any]:
    parts = {part: round(value, 3) for part, value in state.seconds.items()}
    ends = [0.0, *state.task_end_seconds]
    by_task = [round(end - start, 3) for start, end in pairwise(ends)]
    return {**parts, "by_task": by_task}


def model_hash(tensors: Tensors) -> str:
    """Return the SHA-256 of the names, shapes and bits of parameters and buffers."""
    return sha256(encode({name: value.cpu() for name, value in tensors.items()}))
