"""The measures of a run: metrics by inference mode, forgetting after each task, and costs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from perdure.contract.evaluation import MODES
from perdure.contract.metrics import MAIN, meaning
from perdure.contract.metrics import METRICS as METRICS_BY_NAME
from perdure.report.run_records import RunRecord
from perdure.training.metrics import DEFINITIONS

Better = Literal["higher", "lower"] | None
_HIGHER = ("ACC", "learned", "BWT", "Avg")
"""Metrics of which larger values are better."""


@dataclass(frozen=True)
class Measure:
    """A quantity that every run has one value of, such as a metric or a cost."""

    key: str
    """Keys of its value in result.json, such as metrics.task_agnostic.ACC or bytes.up."""
    name: str
    """Short name, such as ACC."""
    meaning: str
    """Definition in one line."""
    unit: str
    """share (from 0 to 1), bytes, s or MB."""
    mode: str | None = None
    """Inference mode of a metric; None for costs."""
    task: int | None = None
    """Task after which it is measured, from 1; None if after the last."""
    better: Better = "lower"
    """Which values are better. None if it is not known."""

    @property
    def title(self) -> str:
        """Return the name, with the unit if formatted values do not show it."""
        return f"{self.name} ({self.unit})" if self.unit == "MB" else self.name

    def value_of(self, record: RunRecord) -> float | None:
        """Return the value of one run, or None if its result has no such value."""
        value: Any = record.result
        for key in self.key.split("."):
            value = _inner(value, key)
        return float(value) if isinstance(value, int | float) else None


@dataclass(frozen=True)
class ScoreMeasure(Measure):
    """A metric of `evaluate.metrics`: the mean over all tasks after the last, or forgetting."""

    metric: str = ""
    """Name of the metric."""
    derived: str = "ACC"
    """ACC for the mean, or FGT for the forgetting."""

    def value_of(self, record: RunRecord) -> float | None:
        """Return the value, or None if a task has none."""
        by_mode = (record.result.get("score_metrics") or {}).get(self.metric) or {}
        value = (by_mode.get(self.mode) or {}).get(self.derived)
        return value if value is not None or self.derived != "ACC" else self._last_mean(record)

    def _last_mean(self, record: RunRecord) -> float | None:
        """Return the mean of the matrix's last row, which may be known if an earlier one is not."""
        by_mode = (record.result.get("scores") or {}).get(self.metric) or {}
        row = (by_mode.get(self.mode) or [[None]])[-1]
        values = [value for value in row if isinstance(value, int | float)]
        return sum(values) / len(row) if len(values) == len(row) else None


def score_measures(records: Iterable[RunRecord]) -> tuple[ScoreMeasure, ...]:
    """Return the measures of all metrics that runs have beside the main one, by mode."""
    records = list(records)
    names = dict.fromkeys(name for r in records for name in r.result.get("scores") or {})
    recorded = {n: m for r in records for n, m in (r.result.get("score_definitions") or {}).items()}
    return tuple(
        measure
        for mode in MODES
        for name in names
        if name not in MAIN.values()
        for measure in _score_measures(name, mode, recorded.get(name) or meaning(name))
    )


def _score_measures(name: str, mode: str, about: str) -> tuple[ScoreMeasure, ScoreMeasure]:
    """Return the mean and the forgetting of a metric."""
    mean = f"{about}; mean over all tasks after the last"
    forgetting = f"forgetting of {name} from its value right after learning, positive if worse"
    return (
        ScoreMeasure(
            f"scores.{name}.{mode}", name, mean, "share", mode, better=_better(name), metric=name
        ),
        ScoreMeasure(
            f"score_metrics.{name}.{mode}.FGT", f"{name} FGT", forgetting, "share", mode,
            metric=name, derived="FGT",
        ),
    )  # fmt: skip


def _better(name: str) -> Better:
    """Return which values of a built-in metric are better; None for others."""
    if not METRICS_BY_NAME.is_builtin(name):
        return None
    return "lower" if METRICS_BY_NAME.find(name).lower_is_better else "higher"


METRICS = tuple(
    Measure(
        f"metrics.{mode}.{name}", name, meaning, "share", mode,
        better="higher" if name in _HIGHER else "lower",
    )
    for mode in MODES
    for name, meaning in DEFINITIONS.items()
)  # fmt: skip
COSTS = (
    Measure("bytes.up", "sent up", "bytes from clients to the server", "bytes"),
    Measure("bytes.down", "sent down", "bytes from the server to clients", "bytes"),
    Measure(
        "bytes.per_client.up.mean", "up per client",
        "bytes that a client sends in all tasks, mean over the clients that took part", "bytes",
    ),
    Measure(
        "bytes.per_client.up.max", "up, most",
        "bytes that the client that sends most sends in all tasks", "bytes",
    ),
    Measure(
        "bytes.kept.mean", "kept per client",
        "bytes that a client stores after the last task, mean over all clients", "bytes",
    ),
    Measure(
        "bytes.kept.max", "kept, most",
        "bytes that the client that stores most stores after the last task", "bytes",
    ),
    Measure("seconds.total", "seconds", "time of training, consolidation and evaluation", "s"),
    Measure("peak_rss_mb", "memory", "peak memory of the process", "MB"),
)  # fmt: skip


def all_measures(tasks: int) -> tuple[Measure, ...]:
    """Return the measures of runs with so many tasks."""
    return (*METRICS, *_forgetting_by_task(tasks), *COSTS)


def _forgetting_by_task(tasks: int) -> tuple[Measure, ...]:
    return tuple(
        Measure(
            f"forgetting.{mode}.{task - 1}", f"F_{task}",
            f"forgetting after task {task}, of which F is the mean (PIP)", "share", mode, task,
        )
        for mode in MODES
        for task in range(2, tasks + 1)
    )  # fmt: skip


def _inner(value: Any, key: str) -> Any:
    """Return the value of a key of a dict or of a position of a list, or None."""
    if isinstance(value, dict):
        return value.get(key)
    is_position = isinstance(value, list) and key.isdigit() and int(key) < len(value)
    return value[int(key)] if is_position else None
