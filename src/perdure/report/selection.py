"""Settings of a method selected on validation rows, never on test rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from perdure.core.json_text import is_number, json_value

if TYPE_CHECKING:
    from perdure.report.run_records import RunRecord

METRIC = ("validation", "metrics", "task_agnostic", "ACC")
"""Keys of the score in result.json."""
SettingScores = dict[str, dict[str, dict[str, float]]]


@dataclass(frozen=True)
class Selection:
    """The setting of each method with the best mean accuracy on validation rows."""

    scores: SettingScores
    """By method and by label of a setting the score of each seed."""

    @property
    def selected(self) -> dict[str, str]:
        """Return the label of the best setting of each method; the first of equal ones."""
        return {
            method: max(settings, key=lambda label: fmean(settings[label].values()))
            for method, settings in self.scores.items()
        }

    @property
    def rejected(self) -> set[str]:
        """Return the labels of all other settings."""
        labels = {label for settings in self.scores.values() for label in settings}
        return labels - set(self.selected.values())

    @property
    def notes(self) -> tuple[str, ...]:
        """Return sentences on what was selected on which rows."""
        chosen = [
            f"{label} of {len(self.scores[method])}" for method, label in self.selected.items()
            if len(self.scores[method]) > 1
        ]  # fmt: skip
        what = f": {', '.join(chosen)}" if chosen else ""
        return (
            f"Settings were selected on validation rows (best mean task-agnostic ACC){what}. All "
            "numbers of the tables are of test rows.",
        )

    def rows(self) -> list[list[str]]:
        """Return one row per setting: method, setting, seeds, score, and whether it is selected."""
        best = self.selected
        return [
            [method, label, str(len(by_seed)), f"{fmean(by_seed.values()):.3f}",
             "selected" if label == best[method] else ""]
            for method, settings in self.scores.items()
            for label, by_seed in settings.items()
        ]  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """Return the selection as written to comparison.json."""
        return {
            "rows": "validation", "metric": ".".join(METRIC[1:]), "selected": self.selected,
            "scores": self.scores,
        }  # fmt: skip


ROW_TITLES = ["method", "setting", "n", "validation ACC", ""]
"""Titles of the columns of `Selection.rows`."""


def select_settings(
    methods: Mapping[str, str], groups: Mapping[str, Sequence[RunRecord]]
) -> Selection:
    """Select the best setting of each method.

    Args:
        methods: Method of each setting, by the label of the setting.
        groups: Finished runs by the label of their setting.
    """
    scores: SettingScores = {}
    for label, records in groups.items():
        by_seed = {str(r.seed): score for r in records if (score := _score(r)) is not None}
        if by_seed and label in methods:
            scores.setdefault(methods[label], {})[label] = by_seed
    return Selection(scores)


def read_selection(folder: Path) -> Selection | None:
    """Return the selection that a comparison recorded, or None if there is none."""
    try:
        scores = json_value((folder / "comparison.json").read_bytes())["selection"]["scores"]
        if all(map(_is_setting_scores, scores.values())):
            return Selection(scores)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    return None


def _is_setting_scores(settings: Any) -> bool:
    """Return whether a value is the scores of each seed by label, of at least one."""
    scores = [list(by_seed.values()) for by_seed in settings.values()]
    return bool(scores) and all(each and all(map(is_number, each)) for each in scores)


def _score(record: RunRecord) -> float | None:
    value: Any = record.result
    for key in METRIC:
        value = value.get(key) if isinstance(value, dict) else None
    return float(value) if isinstance(value, int | float) else None
