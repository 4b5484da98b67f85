"""Figures of sweeps: a metric over the values of a key, one line per method."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from perdure.report.accuracy import MODE_NAMES, spread_note
from perdure.report.figure_data import Axis, Figure, LineFigure, Point, Series, summarize_seeds
from perdure.report.quantity import quantity_of
from perdure.report.run_records import RunRecord, Runs

_METRICS = ("ACC", "FGT")
_METHOD = ("method.kind", "stream.cumulative")
"""Keys that make another method of it, such as joint training."""
Group = tuple[RunRecord, ...]
"""Runs that differ only in their seed."""


def sweep_figures(runs: Runs, mode: str) -> list[Figure]:
    """Return ACC and FGT over the values of every key that was swept; empty without a sweep."""
    groups = list(runs.groups.values())
    figures = [
        _figure(runs, groups, key, metric, mode)
        for key in swept_keys(groups)
        for metric in _METRICS
    ]
    return [figure for figure in figures if figure.series]


def swept_keys(groups: Sequence[Group]) -> list[str]:
    """Return the keys in which two groups of runs differ that agree in everything else."""
    keys = dict.fromkeys(key for group in groups for key in group[0].settings)
    chosen = [key for key in keys if key not in _METHOD and not _is_engine(key)]
    return [key for key in chosen if any(len(line) > 1 for line in _lines(groups, key))]


def _lines(groups: Sequence[Group], key: str) -> list[list[Group]]:
    """Return the groups that agree in everything but a key, in lists."""
    lines: dict[str, list[Group]] = {}
    for group in groups:
        same = {k: v for k, v in group[0].settings.items() if k != key and not _is_engine(k)}
        if group[0].setting(key) is not None:
            lines.setdefault(repr(sorted(same.items())), []).append(group)
    return list(lines.values())


def _is_engine(key: str) -> bool:
    return key.startswith("engine.")


def _figure(
    runs: Runs, groups: Sequence[Group], key: str, metric: str, mode: str
) -> LineFigure:  # fmt: skip
    lines = [line for line in _lines(groups, key) if len(line) > 1]
    values = _in_order([group[0].setting(key) for line in lines for group in line])
    names = _names([line[0][0] for line in lines], key)
    series = [
        Series(name, style, points)
        for style, (name, line) in enumerate(zip(names, lines, strict=True))
        if (points := _points(line, key, values, metric, mode))
    ]
    short, quantity = key.removeprefix("method."), quantity_of(runs)
    return LineFigure(
        f"sweep-{key.replace('.', '-')}-{metric}-{mode}",
        f"{metric} by {short}, {MODE_NAMES[mode]}",
        f"{metric}: {quantity.definitions[metric]}. The values of {key} are evenly spaced. "
        f"{spread_note(runs)}",
        Axis(key, integer=True, names=tuple(str(value) for value in values)),
        quantity.axis if metric == "ACC" else quantity.forgetting,
        tuple(series),
    )


def _points(
    line: Sequence[Group], key: str, values: Sequence[Any], metric: str, mode: str
) -> tuple[Point, ...]:
    points = []
    for group in line:
        metrics = [record.result["metrics"].get(mode) or {} for record in group]
        cell = summarize_seeds([each.get(metric) for each in metrics])
        if cell is not None:
            points.append(Point(float(values.index(group[0].setting(key))), cell))
    return tuple(sorted(points, key=lambda point: point.x))


def _in_order(values: Sequence[Any]) -> list[Any]:
    """Return different values, numbers by size and others as they come."""
    different: list[Any] = []
    for value in values:
        if value not in different:
            different.append(value)
    are_numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in different)
    return sorted(different) if are_numbers else different


def _names(records: Sequence[RunRecord], key: str) -> list[str]:
    """Return the kind of each line's method, with the settings in which lines of a kind differ."""
    names = []
    for record in records:
        alike = [other for other in records if other.kind == record.kind]
        keys = dict.fromkeys(k for other in alike for k in other.settings)
        differing = [
            k for k in keys
            if k != key and not _is_engine(k) and len({repr(o.setting(k)) for o in alike}) > 1
        ]  # fmt: skip
        changed = (f"{k.removeprefix('method.')}={record.setting(k)}" for k in differing)
        names.append(" ".join([record.kind, *changed]))
    return names
