"""The comparison table: every measured value of every method, over seeds and against the first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from perdure.contract.evaluation import MODES
from perdure.core.errors import bad_value
from perdure.report.run_records import RunRecord
from perdure.report.statistics import LEVEL, Difference, Summary, paired_difference, summarize
from perdure.training.metrics import DEFINITIONS

Groups = Mapping[str, Sequence[RunRecord]]
"""Runs of one setting and several seeds, by the name of the setting (Runs.groups)."""


@dataclass(frozen=True)
class Measure:
    """Something that is measured once a run."""

    key: str
    """Where it is in result.json, such as metrics.task_agnostic.ACC or bytes.up."""
    name: str
    meaning: str
    unit: str
    mode: str | None = None
    """The mode of inference, for metrics."""

    @property
    def title(self) -> str:
        """The name with its unit, where its numbers do not carry one."""
        return f"{self.name} ({self.unit})" if self.unit == "MB" else self.name

    def value_of(self, record: RunRecord) -> float | None:
        """The value of one run; None where it has none."""
        found: Any = record.result
        for part in self.key.split("."):
            found = found.get(part) if isinstance(found, dict) else None
        return float(found) if isinstance(found, int | float) else None


METRICS = tuple(
    Measure(f"metrics.{mode}.{name}", name, meaning, "share", mode)
    for mode in MODES
    for name, meaning in DEFINITIONS.items()
)
COSTS = (
    Measure("bytes.up", "sent up", "bytes from clients to the server", "bytes"),
    Measure("bytes.down", "sent down", "bytes from the server to clients", "bytes"),
    Measure("seconds.total", "seconds", "time of training, consolidation and evaluation", "s"),
    Measure("peak_rss_mb", "memory", "most memory that the process held", "MB"),
)


@dataclass(frozen=True)
class Cell:
    """One value of one method."""

    summary: Summary
    difference: Difference | None
    """Against the first method, seed by seed; None for the first itself."""
    by_seed: dict[int, float]


@dataclass(frozen=True)
class Comparison:
    """Methods (or settings of a method) side by side; `cells[label][measure.key]`."""

    reference: str
    """The method that the others are compared with."""
    measures: tuple[Measure, ...]
    cells: dict[str, dict[str, Cell]]

    @property
    def labels(self) -> list[str]:
        """The names of the methods, the reference first."""
        return list(self.cells)

    @property
    def modes(self) -> list[str]:
        """Modes of inference in which something was measured."""
        return [mode for mode in MODES if any(m.mode == mode for m in self.measures)]

    def measures_of(self, mode: str | None) -> list[Measure]:
        """The metrics of a mode; None: what a run cost."""
        return [measure for measure in self.measures if measure.mode == mode]

    def cell(self, label: str, key: str) -> Cell | None:
        """One value, or None where a method has none (routed accuracy without routing)."""
        return self.cells[label].get(key)

    def to_dict(self) -> dict[str, Any]:
        """For a JSON file."""
        return {
            "reference": self.reference,
            "std": "sample standard deviation, divided by n-1",
            "interval": f"paired over seeds, Student t, two-sided, {LEVEL:.0%}",
            "measures": [asdict(measure) for measure in self.measures],
            "cells": {
                label: {key: _plain_cell(cell) for key, cell in row.items()}
                for label, row in self.cells.items()
            },
        }


def compare_groups(groups: Groups, reference: str | None = None) -> Comparison:
    """The comparison of groups of runs; without `reference`, against the first group."""
    first = reference if reference is not None else next(iter(groups), "")
    if first not in groups:
        raise bad_value("reference", first, ", ".join(groups))
    labels = [first, *(label for label in groups if label != first)]
    measured = {m.key: {label: _by_seed(m, groups[label]) for label in labels} for m in _ALL}
    kept = tuple(measure for measure in _ALL if any(measured[measure.key].values()))
    cells: dict[str, dict[str, Cell]] = {label: {} for label in labels}
    for measure in kept:
        theirs = measured[measure.key][first]
        for label, ours in measured[measure.key].items():
            summary = summarize(list(ours.values()))
            if summary is not None:
                gap = paired_difference(ours, theirs) if label != first else None
                cells[label][measure.key] = Cell(summary, gap, ours)
    return Comparison(first, kept, cells)


_ALL = (*METRICS, *COSTS)


def _by_seed(measure: Measure, records: Sequence[RunRecord]) -> dict[int, float]:
    found = {record.seed: measure.value_of(record) for record in records}
    return {seed: value for seed, value in found.items() if value is not None}


def _plain_cell(cell: Cell) -> dict[str, Any]:
    return {
        **asdict(cell.summary),
        "difference": asdict(cell.difference) if cell.difference else None,
        "by_seed": {str(seed): value for seed, value in cell.by_seed.items()},
    }
