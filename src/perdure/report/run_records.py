"""Finished runs, read back from their directories; what cannot be used is named and left out."""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from perdure.config import Config
from perdure.core.errors import UserError
from perdure.methods import drop_defaults, hyperparameters, is_builtin
from perdure.runs.directory import RunDirectory, flatten_keys

_log = logging.getLogger(__name__)
_ENGINE = "engine."


def _has(*keys: str) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(key in value for key in keys)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


_NEEDED: dict[str, Callable[[Any], bool]] = {
    "method": lambda value: isinstance(value, str),
    "seed": _is_count,
    "tasks": _is_count,
    "matrix": _has(),
    "metrics": _has("task_agnostic"),
    "bytes": _has("up", "down"),
    "seconds": _has("total"),
}
"""What a result.json must have, and how it is known to be right."""


@dataclass(frozen=True)
class RunRecord:
    """One finished run."""

    path: Path
    config: Config
    result: dict[str, Any]
    """result.json."""

    @property
    def kind(self) -> str:
        """The method's kind."""
        kind: str = self.config.method["kind"]
        return kind

    @property
    def seed(self) -> int:
        """The seed of the run."""
        return self.config.seed

    @property
    def tasks(self) -> int:
        """Tasks of the stream, as many as were found in the data."""
        return int(self.result["tasks"])

    def events(self) -> Iterator[dict[str, Any]]:
        """The lines of events.jsonl; a half-written last one is left out."""
        yield from RunDirectory.open(self.path).events()

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The config without its seed as {"section.key": value}: alike for runs to be averaged.

        Of the method only what is not its default: a config may spell that out or not.
        """
        values = self.config.model_dump(mode="json", exclude={"seed", "runs"})
        values["method"] = drop_defaults(values["method"])
        return {key: value for key, value in flatten_keys(values).items() if value is not None}

    def setting(self, key: str) -> Any:
        """The value of a key that may be a default of the method; None: it has no such key."""
        values = self.config.method
        usual = hyperparameters(self.kind) if is_builtin(values) else {}
        default = usual.get(key.removeprefix("method.")) if key.startswith("method.") else None
        return self.settings.get(key, default)


@dataclass(frozen=True)
class Skipped:
    """A directory that could not be used, and why."""

    path: Path
    reason: str


@dataclass(frozen=True)
class Runs:
    """Finished runs of equally many tasks, and what was left out."""

    records: tuple[RunRecord, ...]
    skipped: tuple[Skipped, ...] = ()

    @cached_property
    def groups(self) -> dict[str, tuple[RunRecord, ...]]:
        """Runs that differ in nothing but the seed, under a name that tells the groups apart.

        Their engine may differ, too, unless a seed was run on several engines to compare them.
        """
        work = _grouped(self.records, lambda record: _engine_settings(record, engine=False))
        members = [_one_per_seed(group) for alike in work for group in _by_engine(alike)]
        return dict(zip(group_names([group[0] for group in members]), members, strict=True))


def read_runs(paths: Iterable[str | Path]) -> Runs:
    """Every finished run in these directories, which are runs or hold runs at any depth.

    What is not finished, cannot be read or has another number of tasks than most is skipped with a
    warning. Nothing left is a mistake of the user's.
    """
    named = [Path(path) for path in paths]
    records: list[RunRecord] = []
    skipped: list[Skipped] = []
    for folder in _run_folders(named, skipped):
        try:
            records.append(read_run(folder))
        except UserError as error:
            skipped.append(Skipped(folder, _reason(folder, error)))
    records, others = _same_task_count(records)
    skipped += others
    for each in skipped:
        _log.warning("%s is left out: %s", each.path, each.reason)
    if not records:
        places = ", ".join(str(path) for path in named) or "no directory"
        raise UserError(f"{places}: no finished run there (a run directory has a result.json)")
    return Runs(tuple(records), tuple(skipped))


def read_run(path: str | Path) -> RunRecord:
    """One finished run; UserError if it is not one."""
    directory = RunDirectory.open(path)
    result = directory.load_result()
    lacking = [key for key in _NEEDED if key not in result]
    if lacking:
        raise UserError(f"{path}: result.json lacks {', '.join(lacking)}")
    wrong = next((key for key, allowed in _NEEDED.items() if not allowed(result[key])), None)
    if wrong is not None:
        raise UserError(f"{path}: result.json has {wrong} {_short(result[wrong])}")
    return RunRecord(Path(path), directory.config(), result)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def is_run(folder: Path) -> bool:
    """Whether a folder is a run directory, finished or not."""
    return (folder / "config.yaml").is_file()


def run_folders(path: Path) -> Iterator[Path]:
    """The run directories at or below a folder, in the order of their names."""
    for folder, below, _ in os.walk(path):
        below.sort(key=_natural)
        if is_run(Path(folder)):
            below.clear()  # what lies inside a run is its own
            yield Path(folder)


def group_names(records: Sequence[RunRecord]) -> list[str]:
    """A name for each group, of which `records` holds one run each.

    It is a comparison's label or the method's kind, with settings where that is not enough.
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
    laid_out = record.path.name == f"seed-{record.seed}"  # as a comparison lays out its runs
    return record.path.resolve().parent.name if laid_out else record.kind


def _alike(records: Sequence[RunRecord], names: list[str], name: str) -> list[RunRecord]:
    return [record for record, other in zip(records, names, strict=True) if other == name]


def _distinguishing_settings(record: RunRecord, others: Sequence[RunRecord]) -> str:
    """The settings in which a run differs from others of its name."""
    keys = dict.fromkeys(key for other in others for key in other.settings)
    told = [key for key in keys if len({repr(o.settings.get(key)) for o in others}) > 1]
    work = [key for key in told if not key.startswith(_ENGINE)]
    if len({repr([o.settings.get(key) for key in work]) for o in others}) == len(others):
        told = work
    return ", ".join(f"{key.removeprefix('method.')}={record.setting(key)}" for key in told)


def _grouped(
    records: Iterable[RunRecord], key: Callable[[RunRecord], dict[str, Any]]
) -> list[list[RunRecord]]:
    """Return the records in groups of equal keys."""
    found: dict[str, list[RunRecord]] = {}
    for record in records:
        found.setdefault(repr(sorted(key(record).items())), []).append(record)
    return list(found.values())


def _engine_settings(record: RunRecord, engine: bool) -> dict[str, Any]:
    """Return the settings of a run's engine, or all others."""
    return {key: v for key, v in record.settings.items() if key.startswith(_ENGINE) == engine}


def _by_engine(group: list[RunRecord]) -> list[list[RunRecord]]:
    """Return runs of the same work as one group; by engine if a seed was run on several."""
    engines = _grouped(group, lambda record: _engine_settings(record, engine=True))
    seeds = [seed for part in engines for seed in {record.seed for record in part}]
    return [group] if len(set(seeds)) == len(seeds) else engines


def _one_per_seed(group: list[RunRecord]) -> tuple[RunRecord, ...]:
    """A run that is there twice is counted once: two copies are not two draws."""
    by_seed: dict[int, RunRecord] = {}
    for record in group:
        if record.seed in by_seed:
            _log.warning("%s repeats %s and is left out", record.path, by_seed[record.seed].path)
        by_seed.setdefault(record.seed, record)
    return tuple(by_seed[seed] for seed in sorted(by_seed))


def _run_folders(named: list[Path], skipped: list[Skipped]) -> Iterator[Path]:
    seen: set[Path] = set()
    for path in named:
        if not path.is_dir():
            raise UserError(f"{path}: no such directory")
        found = _as_planned(path, list(run_folders(path)))
        if not found:
            skipped.append(Skipped(path, "no run directory at or below it"))
        for folder in found:
            if folder.resolve() not in seen:
                seen.add(folder.resolve())
                yield folder


def _as_planned(path: Path, found: list[Path]) -> list[Path]:
    """The runs of a comparison in the order of its methods, of which the first is the reference."""
    try:
        planned = json.loads((path / "comparison.json").read_bytes())["runs"]
        order = {path / run["path"]: place for place, run in enumerate(planned)}
    except (OSError, ValueError, KeyError, TypeError):
        return found
    return sorted(found, key=lambda folder: order.get(folder, len(order)))


def _reason(folder: Path, error: UserError) -> str:
    return str(error).removeprefix(f"{folder}: ")


def _same_task_count(records: list[RunRecord]) -> tuple[list[RunRecord], list[Skipped]]:
    """Accuracies after different numbers of tasks do not compare: the most frequent count stays."""
    if not records:
        return [], []
    usual, _ = Counter(record.tasks for record in records).most_common(1)[0]
    others = [
        Skipped(record.path, f"has {record.tasks} tasks, and most of the runs have {usual}")
        for record in records
        if record.tasks != usual
    ]
    return [record for record in records if record.tasks == usual], others


def _natural(name: str) -> tuple[str | int, ...]:
    """Names with their numbers compared as numbers: seed-10 comes after seed-2."""
    head, _, tail = name.rpartition("-")
    return (head, int(tail)) if tail.isdigit() else (name, -1)
