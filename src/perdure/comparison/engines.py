"""One engine and one chunk for all runs of a comparison, decided once and kept in its folder.

Another engine or another chunk adds numbers in another order, which shows in the last digits: runs
that are compared share both. What a config names is kept; what it leaves open is decided here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from perdure.comparison.plan import PlannedRun
from perdure.config import EngineConfig
from perdure.runs.directory import RunDirectory
from perdure.runs.search import is_run

_KINDS = ("serial", "vector")


@dataclass(frozen=True)
class EngineChoice:
    """The engine of a comparison, for configs that leave it open."""

    kind: str | None = None
    """serial or vector, for `auto`; None: not decided."""
    chunk: int | None = None
    """For the vector engine."""

    @classmethod
    def read(cls, kind: Any, chunk: Any) -> EngineChoice:
        """Return the choice that values of a file stand for; an empty one if they are not valid."""
        right = isinstance(chunk, int) and not isinstance(chunk, bool) and chunk > 0
        return cls(kind, chunk if right else None) if kind in _KINDS else cls()

    def to_dict(self) -> dict[str, Any] | None:
        """Return the value for comparison.json; None: no config left the engine open."""
        return asdict(self) if self.kind else None

    def covers(self, asked: EngineConfig) -> bool:
        """Return whether it determines everything that a config leaves open."""
        kind = self.kind if asked.kind == "auto" else asked.kind
        return kind is not None and (kind != "vector" or bool(asked.chunk or self.chunk))

    def filled_from(self, other: EngineChoice) -> EngineChoice:
        """Return the choice with its undecided parts taken from another one."""
        return EngineChoice(self.kind or other.kind, self.chunk or other.chunk)

    def apply_to(self, asked: EngineConfig) -> EngineConfig:
        """Return the engine section with the choice written into it."""
        kind = (self.kind or "serial") if asked.kind == "auto" else asked.kind
        usual = self.chunk if kind == "vector" else None
        return asked.model_copy(update={"kind": kind, "chunk": asked.chunk or usual})


Trial = Callable[[PlannedRun], EngineChoice]
"""Returns the engine that suits a run; an empty choice if the trial failed."""


def leaves_engine_open(asked: EngineConfig) -> bool:
    """Return whether a config leaves the engine or its chunk open."""
    return asked.kind == "auto" or (asked.kind == "vector" and asked.chunk is None)


def recorded_choice(planned: Sequence[PlannedRun], out: Path) -> EngineChoice:
    """Return the choice recorded in comparison.json, else that of a run that has begun."""
    found = (choice for choice in _choices(planned, out) if choice.kind)
    return next(found, EngineChoice())


def with_existing_engines(planned: Sequence[PlannedRun], out: Path) -> tuple[PlannedRun, ...]:
    """Return the plan with the engines of the run directories that exist already."""
    return tuple(_with_existing_engine(run, out) for run in planned)


def choose_engine(
    planned: Sequence[PlannedRun], out: Path, known: EngineChoice, ask: Trial
) -> EngineChoice:
    """Return the choice for all runs that have not begun, by a trial if it is not known.

    If the trial of a method fails, the next method is tried; if all fail, the engine is serial.
    """
    choice = known
    for run in _first_of_each(run for run in planned if _needs_choice(run, out)):
        if not choice.covers(run.config.engine):
            choice = choice.filled_from(ask(run))
    left = any(_needs_choice(run, out) and run.config.engine.kind == "auto" for run in planned)
    return replace(choice, kind="serial") if left and choice.kind is None else choice


def with_engine_choice(
    planned: Sequence[PlannedRun], out: Path, choice: EngineChoice
) -> tuple[PlannedRun, ...]:
    """Return the plan with the choice in the configs of runs that have not begun."""
    return tuple(
        _with_engine(run, choice.apply_to(run.config.engine)) if _needs_choice(run, out) else run
        for run in planned
    )


def _choices(planned: Sequence[PlannedRun], out: Path) -> Iterator[EngineChoice]:
    yield _recorded(out)
    for run in planned:
        if leaves_engine_open(run.config.engine) and is_run(run.path(out)):
            yield _of_run(RunDirectory.open(run.path(out)), run.is_finished(out))


def _recorded(out: Path) -> EngineChoice:
    """Return the choice in comparison.json; an empty one if there is none that can be read."""
    try:
        said = json.loads((out / "comparison.json").read_bytes())["engine"]
        return EngineChoice.read(said["kind"], said["chunk"])
    except (OSError, ValueError, KeyError, TypeError):
        return EngineChoice()


def _of_run(directory: RunDirectory, finished: bool) -> EngineChoice:
    """Return the engine of a run: named by its config, or chosen by itself."""
    said = directory.config().engine
    if said.kind == "auto" and finished:
        result = directory.load_result()
        return EngineChoice.read(result.get("engine"), result.get("chunk"))
    return EngineChoice.read(said.kind, said.chunk)


def _with_existing_engine(run: PlannedRun, out: Path) -> PlannedRun:
    asked = run.config.engine
    if not (leaves_engine_open(asked) and is_run(run.path(out))):
        return run
    there = RunDirectory.open(run.path(out)).config().engine
    return _with_engine(run, _existing_engine(asked, there))


def _existing_engine(asked: EngineConfig, there: EngineConfig) -> EngineConfig:
    """Return the engine of an existing run if the config allows it, else what the config says."""
    kinds = (*_KINDS, "auto") if asked.kind == "auto" else (asked.kind,)
    if there.kind not in kinds:
        return asked
    return asked.model_copy(update={"kind": there.kind, "chunk": asked.chunk or there.chunk})


def _needs_choice(run: PlannedRun, out: Path) -> bool:
    """Return whether a run has not begun and its config leaves the engine open."""
    return leaves_engine_open(run.config.engine) and not is_run(run.path(out))


def _first_of_each(runs: Iterator[PlannedRun]) -> list[PlannedRun]:
    """Return the first run of each label."""
    found: dict[str, PlannedRun] = {}
    for run in runs:
        found.setdefault(run.label, run)
    return list(found.values())


def _with_engine(run: PlannedRun, engine: EngineConfig) -> PlannedRun:
    return replace(run, config=run.config.model_copy(update={"engine": engine}))
