"""What all runs of a comparison share: head, weighting, outputs in the loss, engine and chunk."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from perdure.config.engine import EngineConfig
from perdure.contract.needs import Needs
from perdure.core.documents import json_value
from perdure.methods.registry import build
from perdure.runs.compare.plan import PlannedRun, raise_first_error
from perdure.runs.directory import RunDirectory, is_run
from perdure.training.settings import HEAD, OUTPUTS, WEIGHTING, OpenSetting, take_open_settings

# ---- Choose one head, one weighting and the same outputs in the loss for all runs of a comparison
#
# What a config states is kept. Of what it leaves open, a comparison takes
#
# 1. the value that every method would choose alone, if that is one value;
# 2. else the default: a shared head, weights by samples, and all outputs in the loss (of a growing
#    head those of the task);
# 3. except for a method whose paper demands another value (`Preferences.demanded`).
#
# References, such as joint training, take what the methods have. Runs that exist keep what they
# recorded, and so do further seeds of their method.

NeedsByLabel = Mapping[str, Needs]


def with_common_settings(
    planned: Sequence[PlannedRun], out: Path, method_dir: Path | None = None
) -> tuple[PlannedRun, ...]:
    """Return the plan with the settings filled in that all methods of a comparison share."""
    first = list({run.label: run for run in planned}.values())
    raise_first_error(first, lambda run: build(run.config.method, method_dir).needs)
    needs = {run.label: build(run.config.method, method_dir).needs for run in first}
    started = {run.name for run in planned if is_run(run.path(out))}
    runs = [_as_recorded(run, out) if run.name in started else run for run in planned]
    for setting in (HEAD, WEIGHTING, OUTPUTS):
        for members in _grouped(runs, _surroundings(setting, needs)):
            chosen = _choose(setting, [runs[index] for index in members], needs, started)
            for index, run in zip(members, chosen, strict=True):
                runs[index] = run
    return tuple(runs)


def _as_recorded(run: PlannedRun, out: Path) -> PlannedRun:
    recorded = RunDirectory.open(run.path(out)).config()
    return replace(run, config=take_open_settings(run.config, recorded))


def _surroundings(
    setting: OpenSetting, needs: NeedsByLabel
) -> Callable[[PlannedRun], Hashable]:  # fmt: skip
    """Return a function of a run: runs with equal results share the setting."""

    def of_run(run: PlannedRun) -> Hashable:
        config = run.config
        head = HEAD.choose(config, needs[run.label]) if setting is OUTPUTS else None
        return config.stream.resembles, config.privacy.clip is not None, head

    return of_run


def _grouped(
    runs: Sequence[PlannedRun], key: Callable[[PlannedRun], Hashable]
) -> list[list[int]]:  # fmt: skip
    """Return the positions of the runs in groups of equal keys."""
    groups: dict[Hashable, list[int]] = {}
    for index, run in enumerate(runs):
        groups.setdefault(key(run), []).append(index)
    return list(groups.values())


def _choose(
    setting: OpenSetting, runs: Sequence[PlannedRun], needs: NeedsByLabel, started: set[str]
) -> list[PlannedRun]:
    """Return the runs of a group with the setting filled in."""
    values = {run.label: setting.value(run.config) for run in runs if run.name in started}
    recorded = {label: value for label, value in values.items() if value is not None}
    methods = [run for run in runs if not run.is_reference] or runs
    common = _common_value(setting, methods, needs, recorded)
    return [_filled(setting, run, needs[run.label], recorded, common) for run in runs]


def _common_value(
    setting: OpenSetting,
    runs: Sequence[PlannedRun],
    needs: NeedsByLabel,
    recorded: Mapping[str, Any],
) -> Any:
    free = {
        recorded[run.label]
        for run in runs
        if run.label in recorded and setting.need not in needs[run.label].prefers.demanded
    }
    is_open = [run for run in runs if setting.value(run.config) is None]
    own = free or {setting.choose(run.config, needs[run.label]) for run in is_open}
    default = setting.choose(setting.with_value(runs[0].config, None), Needs())
    return own.pop() if len(own) == 1 else default


def _filled(
    setting: OpenSetting,
    run: PlannedRun,
    needs: Needs,
    recorded: Mapping[str, Any],
    common: Any,
) -> PlannedRun:
    if setting.value(run.config) is not None:
        return run
    own = setting.choose(run.config, needs) if setting.need in needs.prefers.demanded else common
    value = recorded.get(run.label) or own
    return replace(run, config=setting.with_value(run.config, value))


# ---- Choose one engine and one chunk for all runs of a comparison
#
# Engines and chunks differ in the order in which they add numbers, and thereby in the last digits,
# so the runs of a comparison use the same. The choice only fills what a config leaves open; it is
# made once and recorded in comparison.json.


@dataclass(frozen=True)
class EngineChoice:
    """The engine and the chunk for configs that leave them open."""

    kind: str | None = None
    """`serial` or `vector`, used for `auto`. If None, not chosen yet."""
    chunk: int | None = None
    """Clients per stack of the vector engine."""

    @classmethod
    def read(cls, kind: Any, chunk: Any) -> EngineChoice:
        """Return the choice given by values of a file, or an empty one if they are not valid."""
        is_valid = isinstance(chunk, int) and not isinstance(chunk, bool) and chunk > 0
        engines = EngineConfig.registry()
        found = engines.find(kind) if engines.is_builtin(kind) else None
        is_one = found is not None and found.simulates and not found.chooses
        return cls(kind, chunk if is_valid else None) if is_one else cls()

    def to_dict(self) -> dict[str, Any] | None:
        """Return the value for comparison.json, or None if no config left the engine open."""
        return asdict(self) if self.kind else None

    def covers(self, engine: EngineConfig) -> bool:
        """Return whether the choice determines everything that an engine section leaves open."""
        return not engine.chosen(self.kind, self.chunk).is_open

    def filled_from(self, other: EngineChoice) -> EngineChoice:
        """Return the choice with missing values taken from another one."""
        return EngineChoice(self.kind or other.kind, self.chunk or other.chunk)

    def apply_to(self, engine: EngineConfig) -> EngineConfig:
        """Return an engine section whose open keys are filled with the choice."""
        return engine.chosen(self.kind or "serial", self.chunk)


Trial = Callable[[PlannedRun], EngineChoice]
"""Returns the fastest engine for a run, or an empty choice if the trial failed."""


def recorded_choice(planned: Sequence[PlannedRun], out: Path) -> EngineChoice:
    """Return the choice recorded in comparison.json, else that of a run that has started."""
    choices = (choice for choice in _choices(planned, out) if choice.kind)
    return next(choices, EngineChoice())


def with_existing_engines(planned: Sequence[PlannedRun], out: Path) -> tuple[PlannedRun, ...]:
    """Return the plan with the engines of the run directories that already exist."""
    return tuple(_with_existing_engine(run, out) for run in planned)


def choose_engine(
    planned: Sequence[PlannedRun], out: Path, known: EngineChoice, trial: Trial
) -> EngineChoice:
    """Return the choice for all runs that have not started."""
    choice = known
    for run in _first_of_each(run for run in planned if _needs_choice(run, out)):
        if not choice.covers(run.config.engine):
            choice = choice.filled_from(trial(run))
    open_runs = any(_needs_choice(run, out) and run.config.engine.chooses for run in planned)
    return replace(choice, kind="serial") if open_runs and choice.kind is None else choice


def with_engine_choice(
    planned: Sequence[PlannedRun], out: Path, choice: EngineChoice
) -> tuple[PlannedRun, ...]:
    """Return the plan with the choice in the configs of runs that have not started."""
    return tuple(
        _with_engine(run, choice.apply_to(run.config.engine)) if _needs_choice(run, out) else run
        for run in planned
    )


def _choices(planned: Sequence[PlannedRun], out: Path) -> Iterator[EngineChoice]:
    yield _recorded(out)
    for run in planned:
        if run.config.engine.is_open and is_run(run.path(out)):
            yield _of_run(RunDirectory.open(run.path(out)), run.is_finished(out))


def _recorded(out: Path) -> EngineChoice:
    """Return the choice in comparison.json, or an empty one if it cannot be read."""
    try:
        engine = json_value((out / "comparison.json").read_bytes())["engine"]
        return EngineChoice.read(engine["kind"], engine["chunk"])
    except (OSError, ValueError, KeyError, TypeError):
        return EngineChoice()


def _of_run(directory: RunDirectory, finished: bool) -> EngineChoice:
    """Return the engine of a run: named by its config or, for `auto`, by its result."""
    engine = directory.config().engine
    if engine.chooses and finished:
        result = directory.load_result()
        return EngineChoice.read(result.get("engine"), result.get("chunk"))
    return EngineChoice.read(engine.kind, engine.chunk_size)


def _with_existing_engine(run: PlannedRun, out: Path) -> PlannedRun:
    engine = run.config.engine
    if not (engine.is_open and is_run(run.path(out))):
        return run
    existing = RunDirectory.open(run.path(out)).config().engine
    return _with_engine(run, _existing_engine(engine, existing))


def _existing_engine(engine: EngineConfig, existing: EngineConfig) -> EngineConfig:
    """Return the engine of an existing run if the config allows it, else that of the config."""
    allowed = existing.simulates if engine.chooses else existing.kind == engine.kind
    return existing.with_chunk(engine.chunk_size) if allowed else engine


def _needs_choice(run: PlannedRun, out: Path) -> bool:
    """Return whether a run has not started and its config leaves the engine open."""
    return run.config.engine.is_open and not is_run(run.path(out))


def _first_of_each(runs: Iterator[PlannedRun]) -> list[PlannedRun]:
    """Return the first run of each label."""
    first: dict[str, PlannedRun] = {}
    for run in runs:
        first.setdefault(run.label, run)
    return list(first.values())


def _with_engine(run: PlannedRun, engine: EngineConfig) -> PlannedRun:
    return replace(run, config=run.config.model_copy(update={"engine": engine}))
