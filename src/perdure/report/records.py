"""Finished runs: their records, groups of those that differ only in the seed, and their checks."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from perdure.config import Config
from perdure.config.sentences import flatten_keys
from perdure.core.documents import is_count, is_number, json_value
from perdure.core.errors import UserError
from perdure.core.event_log import EVENTS, read_events
from perdure.methods.registry import drop_defaults, hyperparameters, is_builtin, is_reference

# ---- Settings of a method selected on validation rows, never on test rows

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
    """Select the best setting of each method."""
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


# ---- Check the content of a result.json, which anybody may have changed


def check_result(path: str | Path, result: dict[str, Any]) -> None:
    """Refuse a result that lacks what every report needs, or has it in another form."""
    missing = [key for key in _NEEDED if key not in result]
    if missing:
        raise UserError(f"{path}: result.json lacks {', '.join(missing)}")
    wrong = next((key for key, allowed in _NEEDED.items() if not allowed(result[key])), None)
    if wrong is not None:
        raise UserError(f"{path}: result.json has an invalid {wrong}, got {_short(result[wrong])}")


def _has(*keys: str) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(key in value for key in keys)


def _is_row(value: Any) -> bool:
    """Return whether a value is None, or a list or a mapping of numbers and None."""
    cells = value.values() if isinstance(value, dict) else value
    is_group = isinstance(value, dict | list)
    return value is None or (is_group and all(v is None or is_number(v) for v in cells))


def _is_table(value: Any) -> bool:
    return value is None or (isinstance(value, list) and all(map(_is_row, value)))


_NEEDED: dict[str, Callable[[Any], bool]] = {
    "method": lambda value: isinstance(value, str),
    "seed": is_count,
    "tasks": is_count,
    "matrix": lambda value: _has()(value) and all(map(_is_table, value.values())),
    "metrics": lambda value: _has("task_agnostic")(value) and all(map(_is_row, value.values())),
    "measure": lambda value: value in ("accuracy", "r2"),
    "bytes": _has("up", "down", "by_task", "by_field", "types", "kept"),
    "seconds": _has("total", "by_task"),
    "draws": lambda value: isinstance(value, str),
}
"""Keys that a result.json must have, and the checks of their values."""


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


# ---- Read finished runs from their directories, and group those that differ only in the seed

_log = logging.getLogger(__name__)
_ENGINE = "engine."


@dataclass(frozen=True)
class RunRecord:
    """One finished run."""

    path: Path
    """Run directory."""
    config: Config
    """Complete config of the run."""
    result: dict[str, Any]
    """Content of result.json."""

    @property
    def kind(self) -> str:
        """Return the kind of the method."""
        kind: str = self.config.method["kind"]
        return kind

    @property
    def is_reference(self) -> bool:
        """Return whether the run is a reference: joint training, or a kind that is one."""
        return self.config.stream.cumulative or is_reference(self.kind)

    @property
    def seed(self) -> int:
        """Return the seed of the run."""
        return self.config.seed

    @property
    def tasks(self) -> int:
        """Return the number of tasks of the stream."""
        return int(self.result["tasks"])

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        """The events of events.jsonl, read once; none if the file cannot be read."""
        try:
            return read_events(self.path / EVENTS)
        except (UserError, OSError) as error:
            _log.warning("%s", error)
            return []

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Return the config without its seed as {"section.key": value}.

        Runs with equal settings are averaged. Hyperparameters with their default value are
        omitted, since a config may state them or not.
        """
        values = self.config.model_dump(mode="json", exclude={"seed", "runs"})
        values["method"] = drop_defaults(values["method"])
        return {key: value for key, value in flatten_keys(values).items() if value is not None}

    def setting(self, key: str) -> Any:
        """Return the value of a key, set or the default of the method; None if it has none."""
        name = key.removeprefix("method.")
        default = self._defaults.get(name) if key.startswith("method.") else None
        return self.settings.get(key, default)

    @cached_property
    def _defaults(self) -> dict[str, Any]:
        """The defaults of the method's hyperparameters; none if it is a custom one."""
        return hyperparameters(self.kind) if is_builtin(self.config.method) else {}


@dataclass(frozen=True)
class Skipped:
    """A directory that cannot be used."""

    path: Path
    """The directory."""
    reason: str
    """Why it cannot be used."""


@dataclass(frozen=True)
class Runs:
    """Finished runs that have the same number of tasks."""

    records: tuple[RunRecord, ...]
    """The runs."""
    skipped: tuple[Skipped, ...] = ()
    """Directories that cannot be used."""
    selections: tuple[Selection, ...] = ()
    """Selections of settings that comparisons recorded; runs of other settings are left out."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Return the sentences of the selections."""
        return tuple(note for selection in self.selections for note in selection.notes)

    @cached_property
    def groups(self) -> dict[str, tuple[RunRecord, ...]]:
        """Return the runs by group, named by what distinguishes the groups.

        The runs of a group differ only in their seed. Their engines may differ as well, unless a
        seed was run on several engines to compare these.
        """
        members: list[tuple[RunRecord, ...]] = []
        for alike in _grouped(self.records, engine=False):
            engines = _grouped(alike, engine=True)
            seeds = [seed for part in engines for seed in {record.seed for record in part}]
            for group in engines if len(set(seeds)) < len(seeds) else [alike]:
                by_seed: dict[int, RunRecord] = {}
                for record in group:
                    if record.seed in by_seed:  # a copy is not independent
                        first = by_seed[record.seed].path
                        _log.warning("%s repeats %s and is skipped", record.path, first)
                    by_seed.setdefault(record.seed, record)
                members.append(tuple(by_seed[seed] for seed in sorted(by_seed)))
        return dict(zip(group_names([group[0] for group in members]), members, strict=True))


def group_names(records: Sequence[RunRecord]) -> list[str]:
    """Return one name per group, given one run of each.

    A name is the label in a comparison or the kind of the method; if several groups have the same,
    the settings in which they differ are appended.
    """
    names = [
        record.path.resolve().parent.name
        if record.path.name == f"seed-{record.seed}"  # of a comparison
        else record.kind
        for record in records
    ]
    counts = Counter(names)
    return [
        name
        if counts[name] == 1
        else f"{name} {_distinguishing_settings(record, _alike(records, names, name))}"
        for name, record in zip(names, records, strict=True)
    ]


def _alike(records: Sequence[RunRecord], names: list[str], name: str) -> list[RunRecord]:
    return [record for record, other in zip(records, names, strict=True) if other == name]


def _distinguishing_settings(record: RunRecord, others: Sequence[RunRecord]) -> str:
    """Return the settings in which a run differs from others with its name, as text."""
    differing = differing_settings(others)
    work = [key for key in differing if not key.startswith(_ENGINE)]
    if len({repr([o.settings.get(key) for key in work]) for o in others}) == len(others):
        differing = work
    return ", ".join(f"{key.removeprefix('method.')}={record.setting(key)}" for key in differing)


def differing_settings(records: Sequence[RunRecord]) -> list[str]:
    """Return the keys whose values are not equal in all runs."""
    values: dict[str, list[str]] = {}
    for record in records:
        for key, value in record.settings.items():
            values.setdefault(key, []).append(repr(value))
    return [
        key
        for key, found in values.items()
        if len(found) < len(records) or found.count(found[0]) < len(found)
    ]


def _grouped(records: Iterable[RunRecord], engine: bool) -> list[list[RunRecord]]:
    """Return runs in groups of equal settings of the engine or, if not `engine`, of all others."""
    groups: dict[str, list[RunRecord]] = {}
    for record in records:
        same = [(k, v) for k, v in record.settings.items() if k.startswith(_ENGINE) == engine]
        groups.setdefault(repr(sorted(same)), []).append(record)
    return list(groups.values())


# ---- Records of runs that were changed since the run wrote them


@contextmanager
def reading_records(runs: Runs) -> Iterator[None]:
    """Report values of result.json and events.jsonl that no run writes, such as text for numbers.

    Raises:
        UserError: The block failed by such a value.

    """
    try:
        yield
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        names = ", ".join(str(record.path) for record in runs.records)
        reason = f"{type(error).__name__}: {error}"[:120]
        raise UserError(
            f"{names}: result.json and events.jsonl must be as the run wrote them, got a value of "
            f"another type or size ({reason})"
        ) from error
