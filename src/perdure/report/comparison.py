"""Compare groups of runs: mean and spread of every measure, and differences from a reference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from perdure.core.errors import bad_value
from perdure.evaluation.evaluator import MODES
from perdure.evaluation.forgetting import DEFINITIONS
from perdure.evaluation.metrics import MAIN, meaning
from perdure.evaluation.metrics import METRICS as METRICS_BY_NAME
from perdure.methods.registry import build, is_builtin
from perdure.report.figure_data import LEVEL, Difference, Summary, paired_difference, summarize
from perdure.report.records import RunRecord
from perdure.training.settings import HEAD, OUTPUTS, WEIGHTING, OpenSetting

# ---- The measures of a run: metrics by inference mode, forgetting after each task, and costs

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
            if isinstance(value, dict):
                value = value.get(key)
            elif isinstance(value, list) and key.isdigit() and int(key) < len(value):
                value = value[int(key)]
            else:
                value = None
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
    better: Better = None  # of a metric that is not built in it is not known
    if METRICS_BY_NAME.is_builtin(name):
        better = "lower" if METRICS_BY_NAME.find(name).lower_is_better else "higher"
    mean = f"{about}; mean over all tasks after the last"
    forgetting = f"forgetting of {name} from its value right after learning, positive if worse"
    return (
        ScoreMeasure(
            f"scores.{name}.{mode}", name, mean, "share", mode, better=better, metric=name
        ),
        ScoreMeasure(
            f"score_metrics.{name}.{mode}.FGT", f"{name} FGT", forgetting, "share", mode,
            metric=name, derived="FGT",
        ),
    )  # fmt: skip


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


def _forgetting_by_task(tasks: int) -> tuple[Measure, ...]:
    return tuple(
        Measure(
            f"forgetting.{mode}.{task - 1}", f"F_{task}",
            f"forgetting after task {task}, of which F is the mean (PIP)", "share", mode, task,
        )
        for mode in MODES
        for task in range(2, tasks + 1)
    )  # fmt: skip


# ---- Sentences on the head, the outputs in the loss and the weights of the methods of a table

_WORDS = {HEAD: "head", OUTPUTS: "outputs in the loss", WEIGHTING: "client weights"}
Values = dict[OpenSetting, str]
"""The settings of a method."""


def settings_notes(groups: Mapping[str, Sequence[RunRecord]]) -> tuple[str, ...]:
    """Return one sentence on what all methods share, and one per method that differs."""
    values: dict[str, Values] = {}
    for label, runs in groups.items():
        known = {setting: setting.value(runs[0].config) for setting in _WORDS}
        own = {setting: value for setting, value in known.items() if value is not None}
        if len(own) == len(_WORDS):
            values[label] = own
    if not values:
        return ()
    common = {
        setting: Counter(own[setting] for own in values.values()).most_common(1)[0][0]
        for setting in _WORDS
    }
    others = [label for label, own in values.items() if own != common]
    everyone = "Methods that are not named below" if others else "All methods"
    words = ", ".join(f"{_WORDS[setting]} {value}" for setting, value in common.items())
    first = f"{everyone if len(values) > 1 else 'Settings'}: {words}."
    differences = [_difference(groups[name][0], name, values[name], common) for name in others]
    return (first, *differences)


def _difference(record: RunRecord, label: str, own: Values, common: Values) -> str:
    parts = [
        f"{_WORDS[setting]} {value} ({_reason(record, setting, own)})"
        for setting, value in own.items()
        if value != common[setting]
    ]
    return f"{label}: {', '.join(parts)}."


def _reason(record: RunRecord, setting: OpenSetting, own: Values) -> str:
    """Return why a method has another value: its paper demands it, or the config says so."""
    method = record.config.method
    demands = build(method).needs.prefers.demanded if is_builtin(method) else {}
    if setting.need in demands:
        return demands[setting.need]
    follows = setting is OUTPUTS and own[HEAD] == "growing" and own[OUTPUTS] == "task"
    return "as its head requires" if follows else "set by its config"


# ---- Compare groups of runs: mean and spread of every measure, and differences from a reference

Groups = Mapping[str, Sequence[RunRecord]]
"""Runs that differ only in their seed, by the name of the group (`Runs.groups`)."""


DIVIDER = "references"
"""First cell of the row that sets references apart from methods."""


@dataclass(frozen=True)
class Cell:
    """The values of one measure for one method."""

    summary: Summary
    """Mean and spread over seeds."""
    difference: Difference | None
    """Paired difference from the reference; None for the reference."""
    by_seed: dict[int, float]
    """Value of each seed."""

    def to_dict(self) -> dict[str, Any]:
        """Return the cell as JSON values."""
        return {
            **asdict(self.summary),
            "difference": asdict(self.difference) if self.difference else None,
            "by_seed": {str(seed): value for seed, value in self.by_seed.items()},
        }


@dataclass(frozen=True, repr=False)
class Comparison:
    """A table of methods, or of settings of a method, and measures. A notebook shows it."""

    reference: str
    """Label of the method that the others are compared with."""
    measures: tuple[Measure, ...]
    """Measures that at least one run has."""
    cells: dict[str, dict[str, Cell]]
    """Cell of a method and a measure: `cells[label][measure.key]`."""
    notes: tuple[str, ...] = ()
    """Sentences on settings that decide whether the methods are comparable."""
    references: tuple[str, ...] = ()
    """Labels of the references, such as joint training, which stand apart below the methods."""

    @property
    def labels(self) -> list[str]:
        """Return the labels of the methods, the reference first."""
        return list(self.cells)

    @property
    def modes(self) -> list[str]:
        """Return the inference modes that have measures."""
        return [mode for mode in MODES if any(m.mode == mode for m in self.measures)]

    def measures_of(self, mode: str | None) -> list[Measure]:
        """Return the metrics of an inference mode or, if `mode` is None, the costs."""
        return [m for m in self.measures if m.mode == mode and m.task is None]

    def measures_by_task(self, mode: str) -> list[Measure]:
        """Return the measures of an inference mode that have one value after each task."""
        return [m for m in self.measures if m.mode == mode and m.task is not None]

    def cell(self, label: str, key: str) -> Cell | None:
        """Return one cell, or None if the method has no such value (such as routed accuracy)."""
        return self.cells[label].get(key)

    def seed_count(self, label: str, measures: Sequence[Measure]) -> int:
        """Return the largest number of seeds of a method in any of these measures."""
        cells = (self.cell(label, measure.key) for measure in measures)
        return max((cell.summary.count for cell in cells if cell), default=0)

    def to_frame(self) -> Any:
        """Return a pandas DataFrame with one row per method and measure.

        Raises:
            UserError: pandas is not installed.

        """
        from perdure.report.table_writers import comparison_frame

        return comparison_frame(self)

    def __repr__(self) -> str:
        from perdure.report.table_writers import comparison_line

        return f"Comparison({comparison_line(self)})"

    def _repr_html_(self) -> str:
        from perdure.report.table_writers import comparison_html

        return comparison_html(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the table as JSON values, as written to comparison.json."""
        return {
            "reference": self.reference,
            "references": list(self.references),
            "notes": list(self.notes),
            "std": "sample standard deviation, divided by n-1",
            "interval": f"paired over seeds, Student t, two-sided, {LEVEL:.0%}",
            "measures": [asdict(measure) for measure in self.measures],
            "cells": {
                label: {key: cell.to_dict() for key, cell in row.items()}
                for label, row in self.cells.items()
            },
        }


def compare_groups(
    groups: Groups, reference: str | None = None, notes: Sequence[str] = ()
) -> Comparison:
    """Compare groups of runs.

    Raises:
        UserError: There is no group with the label `reference`.

    """
    first = reference if reference is not None else next(iter(groups), "")
    if first not in groups:
        raise bad_value("reference", first, ", ".join(groups))
    references = [label for label in groups if label != first and groups[label][0].is_reference]
    methods = [label for label in groups if label != first and label not in references]
    labels = [first, *methods, *references]
    records = [record for group in groups.values() for record in group]
    tasks = max((record.tasks for record in records), default=0)
    possible = (*METRICS, *_forgetting_by_task(tasks), *COSTS, *score_measures(records))
    measured = {m.key: {label: _by_seed(m, groups[label]) for label in labels} for m in possible}
    present = tuple(measure for measure in possible if any(measured[measure.key].values()))
    cells: dict[str, dict[str, Cell]] = {label: {} for label in labels}
    for measure in present:
        theirs = measured[measure.key][first]
        for label, ours in measured[measure.key].items():
            summary = summarize(list(ours.values()))
            if summary is not None:
                gap = paired_difference(ours, theirs) if label != first else None
                cells[label][measure.key] = Cell(summary, gap, ours)
    return Comparison(first, present, cells, (*notes, *settings_notes(groups)), tuple(references))


def _by_seed(measure: Measure, records: Sequence[RunRecord]) -> dict[int, float]:
    values = {record.seed: measure.value_of(record) for record in records}
    return {seed: value for seed, value in values.items() if value is not None}
