"""Sentences on the head, the outputs in the loss and the weights of the methods of a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from perdure.methods import build, is_builtin
from perdure.report.run_records import RunRecord
from perdure.training.open_settings import HEAD, OUTPUTS, WEIGHTING, OpenSetting

_WORDS = {HEAD: "head", OUTPUTS: "outputs in the loss", WEIGHTING: "client weights"}
Values = dict[OpenSetting, str]
"""The settings of a method."""


def settings_notes(groups: Mapping[str, Sequence[RunRecord]]) -> tuple[str, ...]:
    """Return one sentence on what all methods share, and one per method that differs.

    Args:
        groups: Runs by label. Runs that do not record the settings are left out.
    """
    values = {label: own for label, runs in groups.items() if (own := _values(runs[0]))}
    if not values:
        return ()
    common = {setting: _most_frequent(setting, values) for setting in _WORDS}
    others = [label for label, own in values.items() if own != common]
    everyone = "Methods that are not named below" if others else "All methods"
    first = f"{everyone if len(values) > 1 else 'Settings'}: {_in_words(common)}."
    differences = [_difference(groups[name][0], name, values[name], common) for name in others]
    return (first, *differences)


def _values(record: RunRecord) -> Values | None:
    values = {setting: setting.value(record.config) for setting in _WORDS}
    return None if None in values.values() else values


def _most_frequent(setting: OpenSetting, values: Mapping[str, Values]) -> str:
    return Counter(own[setting] for own in values.values()).most_common(1)[0][0]


def _in_words(values: Values) -> str:
    return ", ".join(f"{_WORDS[setting]} {value}" for setting, value in values.items())


def _difference(record: RunRecord, label: str, own: Values, common: Values) -> str:
    parts = [
        f"{_WORDS[setting]} {value} ({_reason(record, setting, own)})"
        for setting, value in own.items()
        if value != common[setting]
    ]
    return f"{label}: {', '.join(parts)}."


def _reason(record: RunRecord, setting: OpenSetting, own: Values) -> str:
    """Return why a method has another value: its paper demands it, or the config says so."""
    method = record.config.method
    demands = build(method).needs.demands if is_builtin(method) else {}
    if setting.need in demands:
        return demands[setting.need]
    follows = setting is OUTPUTS and own[HEAD] == "growing" and own[OUTPUTS] == "task"
    return "as its head requires" if follows else "set by its config"
