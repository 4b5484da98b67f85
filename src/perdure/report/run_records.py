"""Read finished runs from their directories, and group those that differ only in the seed."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from perdure.config import Config
from perdure.core.errors import UserError
from perdure.core.event_log import EVENTS, read_events
from perdure.core.json_text import json_value
from perdure.methods import REFERENCES, drop_defaults, hyperparameters, is_builtin
from perdure.report.result_checks import check_result
from perdure.report.selection import Selection, read_selection
from perdure.runs.directory import RunDirectory, flatten_keys
from perdure.runs.search import run_folders

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
        return self.config.stream.cumulative or self.kind in REFERENCES

    @property
    def seed(self) -> int:
        """Return the seed of the run."""
        return self.config.seed

    @property
    def tasks(self) -> int:
        """Return the number of tasks of the stream."""
        return int(self.result["tasks"])

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield the events of events.jsonl; an incomplete last line is skipped."""
        yield from read_events(self.path / EVENTS)

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
        work = _grouped(self.records, lambda record: _engine_settings(record, engine=False))
        members = [_one_per_seed(group) for alike in work for group in _by_engine(alike)]
        return dict(zip(group_names([group[0] for group in members]), members, strict=True))


def read_runs(paths: Iterable[str | Path]) -> Runs:
    """Read every finished run at or below some directories.

    Runs that are not finished, cannot be read, or have another number of tasks than most runs are
    skipped with a warning.

    Args:
        paths: Run directories, or directories that contain some at any depth.

    Raises:
        UserError: A directory does not exist, or no finished run is left.
    """
    named = [Path(path) for path in paths]
    records: list[RunRecord] = []
    skipped: list[Skipped] = []
    for path in _run_folders(named, skipped):
        try:
            records.append(read_run(path))
        except UserError as error:
            skipped.append(Skipped(path, _reason(path, error)))
    records, others = _same_task_count(records)
    skipped += others
    for folder in skipped:
        _log.warning("%s is skipped: %s", folder.path, folder.reason)
    if not records:
        names = ", ".join(str(path) for path in named) or "no directory"
        raise UserError(f"{names}: no finished run found (a finished run has a result.json)")
    selections = tuple(s for path in named if (s := read_selection(path)) is not None)
    return Runs(tuple(records), tuple(skipped), selections)


def read_run(path: str | Path) -> RunRecord:
    """Read one finished run.

    Raises:
        UserError: The directory is not a finished run, or its files are not valid.
    """
    directory = RunDirectory.open(path)
    result = directory.load_result()
    check_result(path, result)
    return RunRecord(Path(path), directory.config(), result)


def group_names(records: Sequence[RunRecord]) -> list[str]:
    """Return one name per group, given one run of each.

    A name is the label in a comparison or the kind of the method; if several groups have the same,
    the settings in which they differ are appended.
    """
    names = [_default_name(record) for record in records]
    counts = Counter(names)
    return [
        name
        if counts[name] == 1
        else f"{name} {_distinguishing_settings(record, _alike(records, names, name))}"
        for name, record in zip(names, records, strict=True)
    ]


def _default_name(record: RunRecord) -> str:
    of_comparison = record.path.name == f"seed-{record.seed}"
    return record.path.resolve().parent.name if of_comparison else record.kind


def _alike(records: Sequence[RunRecord], names: list[str], name: str) -> list[RunRecord]:
    return [record for record, other in zip(records, names, strict=True) if other == name]


def _distinguishing_settings(record: RunRecord, others: Sequence[RunRecord]) -> str:
    """Return the settings in which a run differs from others with its name, as text."""
    keys = dict.fromkeys(key for other in others for key in other.settings)
    differing = [key for key in keys if len({repr(o.settings.get(key)) for o in others}) > 1]
    work = [key for key in differing if not key.startswith(_ENGINE)]
    if len({repr([o.settings.get(key) for key in work]) for o in others}) == len(others):
        differing = work
    return ", ".join(f"{key.removeprefix('method.')}={record.setting(key)}" for key in differing)


def _grouped(
    records: Iterable[RunRecord], key: Callable[[RunRecord], dict[str, Any]]
) -> list[list[RunRecord]]:
    """Return the records in groups of equal keys."""
    groups: dict[str, list[RunRecord]] = {}
    for record in records:
        groups.setdefault(repr(sorted(key(record).items())), []).append(record)
    return list(groups.values())


def _engine_settings(record: RunRecord, engine: bool) -> dict[str, Any]:
    """Return the settings of the engine of a run or, if `engine` is False, all others."""
    return {key: v for key, v in record.settings.items() if key.startswith(_ENGINE) == engine}


def _by_engine(group: list[RunRecord]) -> list[list[RunRecord]]:
    """Return runs with equal other settings as one group, or by engine if a seed has several."""
    engines = _grouped(group, lambda record: _engine_settings(record, engine=True))
    seeds = [seed for part in engines for seed in {record.seed for record in part}]
    return [group] if len(set(seeds)) == len(seeds) else engines


def _one_per_seed(group: list[RunRecord]) -> tuple[RunRecord, ...]:
    """Return one run per seed, since copies of a run are not independent."""
    by_seed: dict[int, RunRecord] = {}
    for record in group:
        if record.seed in by_seed:
            _log.warning("%s repeats %s and is skipped", record.path, by_seed[record.seed].path)
        by_seed.setdefault(record.seed, record)
    return tuple(by_seed[seed] for seed in sorted(by_seed))


def _run_folders(named: list[Path], skipped: list[Skipped]) -> Iterator[Path]:
    seen: set[Path] = set()
    for path in named:
        if not path.is_dir():
            raise UserError(f"{path}: no such directory")
        selection = read_selection(path)
        rejected = selection.rejected if selection else set()
        folders = _in_plan_order(path, list(run_folders(path)))
        folders = [folder for folder in folders if folder.parent.name not in rejected]
        if not folders:
            skipped.append(Skipped(path, "contains no run directory"))
        for folder in folders:
            if folder.resolve() not in seen:
                seen.add(folder.resolve())
                yield folder


def _in_plan_order(path: Path, folders: list[Path]) -> list[Path]:
    """Return the runs of a comparison in the order of its plan; the first is the reference."""
    try:
        planned = json_value((path / "comparison.json").read_bytes())["runs"]
        order = {path / run["path"]: index for index, run in enumerate(planned)}
    except (OSError, ValueError, KeyError, TypeError):
        return folders
    return sorted(folders, key=lambda folder: order.get(folder, len(order)))


def _reason(folder: Path, error: UserError) -> str:
    return str(error).removeprefix(f"{folder}: ")


def _same_task_count(records: list[RunRecord]) -> tuple[list[RunRecord], list[Skipped]]:
    """Split the runs into those with the most frequent number of tasks, and the others."""
    if not records:
        return [], []
    most_frequent, _ = Counter(record.tasks for record in records).most_common(1)[0]
    others = [
        Skipped(record.path, f"has {record.tasks} tasks, while most runs have {most_frequent}")
        for record in records
        if record.tasks != most_frequent
    ]
    return [record for record in records if record.tasks == most_frequent], others
