"""Choose one head, one weighting and the same outputs in the loss for all runs of a comparison.

What a config states is kept. Of what it leaves open, a comparison takes

1. the value that every method would choose alone, if that is one value;
2. else the default: a shared head, weights by samples, and all outputs in the loss (of a growing
   head those of the task);
3. except for a method whose paper demands another value (`Needs.demands`).

References, such as joint training, take what the methods have. Runs that exist keep what they
recorded, and so do further seeds of their method.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from perdure.comparison.plan import PlannedRun, raise_first_error
from perdure.contract.needs import Needs
from perdure.methods import build
from perdure.runs.directory import RunDirectory
from perdure.runs.search import is_run
from perdure.training.open_settings import (
    HEAD,
    OUTPUTS,
    WEIGHTING,
    OpenSetting,
    take_open_settings,
)

NeedsByLabel = Mapping[str, Needs]


def with_common_settings(
    planned: Sequence[PlannedRun], out: Path, method_dir: Path | None = None
) -> tuple[PlannedRun, ...]:
    """Return the plan with the settings filled in that all methods of a comparison share.

    Args:
        planned: The runs of the comparison.
        out: Directory of the comparison.
        method_dir: Directory with custom methods.
    """
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
        if run.label in recorded and setting.need not in needs[run.label].demands
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
    own = setting.choose(run.config, needs) if setting.need in needs.demands else common
    value = recorded.get(run.label) or own
    return replace(run, config=setting.with_value(run.config, value))
