"""Read finished runs from their directories, and group those that differ only in the seed."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from perdure.core.documents import json_value
from perdure.core.errors import UserError
from perdure.report.records import RunRecord, Runs, Skipped, check_result, read_selection
from perdure.runs.directory import RunDirectory, run_folders

_log = logging.getLogger(__name__)


def read_runs(paths: Iterable[str | Path]) -> Runs:
    """Read every finished run at or below some directories.

    Runs that are not finished, cannot be read, or have another number of tasks than most runs are
    skipped with a warning.

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
