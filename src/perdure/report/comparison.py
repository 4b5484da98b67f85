"""Compare groups of runs: mean and spread of every measure, and differences from a reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from perdure.contract.evaluation import MODES
from perdure.core.errors import bad_value
from perdure.report.measures import Measure, all_measures, score_measures
from perdure.report.run_records import RunRecord
from perdure.report.settings_note import settings_notes
from perdure.report.statistics import LEVEL, Difference, Summary, paired_difference, summarize

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

    def set_apart(self, rows: Sequence[list[Any]]) -> list[list[Any]]:
        """Return a table's rows with a divider before the references; a label begins each row."""
        first = next((i for i, row in enumerate(rows) if row[0] in self.references), 0)
        if first == 0:
            return list(rows)
        return [*rows[:first], [DIVIDER, *[""] * (len(rows[0]) - 1)], *rows[first:]]

    def seed_count(self, label: str, measures: Sequence[Measure]) -> int:
        """Return the largest number of seeds of a method in any of these measures."""
        cells = (self.cell(label, measure.key) for measure in measures)
        return max((cell.summary.count for cell in cells if cell), default=0)

    def to_frame(self) -> Any:
        """Return a pandas DataFrame with one row per method and measure.

        Raises:
            UserError: pandas is not installed.
        """
        from perdure.report.comparison_views import comparison_frame

        return comparison_frame(self)

    def __repr__(self) -> str:
        from perdure.report.comparison_views import comparison_line

        return f"Comparison({comparison_line(self)})"

    def _repr_html_(self) -> str:
        from perdure.report.comparison_views import comparison_html

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
                label: {key: _plain_cell(cell) for key, cell in row.items()}
                for label, row in self.cells.items()
            },
        }


def compare_groups(
    groups: Groups, reference: str | None = None, notes: Sequence[str] = ()
) -> Comparison:
    """Compare groups of runs.

    Args:
        groups: Runs by label; the runs of a group differ only in their seed.
        reference: Label of the group that the others are compared with. If None, the first.
        notes: Sentences to show before those on the settings of the methods.

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
    possible = (*all_measures(tasks), *score_measures(records))
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


def _plain_cell(cell: Cell) -> dict[str, Any]:
    return {
        **asdict(cell.summary),
        "difference": asdict(cell.difference) if cell.difference else None,
        "by_seed": {str(seed): value for seed, value in cell.by_seed.items()},
    }
