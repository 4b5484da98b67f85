"""The section of the page with the configs: where they differ, and how to repeat each run."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from perdure.config import dump
from perdure.report.figure_html import table
from perdure.report.markup import Html, el
from perdure.report.run_records import RunRecord, Runs


def config_section(runs: Runs) -> list[Html]:
    """Return the differences between the configs and, per method, its config and commands."""
    return [*_differences(runs), *(_setup(name, group) for name, group in runs.groups.items())]


def page_title(runs: Runs) -> str:
    """Return the title of the page: methods, stream, data and seeds."""
    methods, first = len(runs.groups), runs.records[0]
    seeds = max(len(group) for group in runs.groups.values())
    subject = f"{methods} methods" if methods > 1 else next(iter(runs.groups))
    many = f", {seeds} seeds" if seeds > 1 else f", seed {first.seed}"
    return f"{subject} on {_common(runs, 'stream.kind')} {_data(runs)}{many}"


def settings_sentence(runs: Runs) -> str:
    """Return a sentence on the settings that all runs have in common."""
    first = runs.records[0]
    parts = [
        f"{first.tasks} tasks" if first.tasks > 1 else "1 task",
        _counted(runs, "clients.count", "client") + _partition(runs),
        f"model {_common(runs, 'model.kind')}",
        f"{_counted(runs, 'train.rounds', 'round').lstrip('[').replace(']', ', ...')} per task",
        _counted(runs, "train.local_epochs", "local epoch"),
        f"batches of {_common(runs, 'train.batch_size')}",
        f"{_common(runs, 'train.optimizer.kind')} with learning rate {_common(runs, 'train.lr')}",
    ]
    return ", ".join(parts) + "."


def _data(runs: Runs) -> str:
    """Return the data of the runs; of a federation each node has its own."""
    return "data of nodes" if _have_own_data(runs) else _common(runs, "data.source")


def _partition(runs: Runs) -> str:
    return "" if _have_own_data(runs) else f" ({_common(runs, 'clients.partition.kind')})"


def _have_own_data(runs: Runs) -> bool:
    return all(record.config.federation is not None for record in runs.records)


def _common(runs: Runs, key: str) -> str:
    values = {str(record.settings.get(key)) for record in runs.records}
    return values.pop() if len(values) == 1 else "different"


def _counted(runs: Runs, key: str, thing: str) -> str:
    number = _common(runs, key)
    return f"{number} {thing}" if number == "1" else f"{number} {thing}s"


def _differences(runs: Runs) -> list[Html]:
    """Return a table of the settings that are not equal in all groups."""
    heads = [group[0] for group in runs.groups.values()]
    keys = dict.fromkeys(key for record in heads for key in record.settings)
    differing = [key for key in keys if len({repr(r.settings.get(key)) for r in heads}) > 1]
    if not differing:
        return []
    rows = [[el("code", key), *(_value(r.setting(key)) for r in heads)] for key in differing]
    return [
        el("p", "Settings in which the methods differ; all others are equal."),
        table(["key", *runs.groups], rows),
    ]


def _value(value: Any) -> str:
    return "\u2013" if value is None else str(value)


def _setup(name: str, group: Sequence[RunRecord]) -> Html:
    seeds = ", ".join(str(record.seed) for record in group)
    hashes = [[f"seed {r.seed}", str(r.result.get("model_sha256", "\u2013"))] for r in group]
    return el(
        "details",
        el("summary", f"{name}: complete config and commands (seeds {seeds})"),
        el("pre", el("code", "\n".join(rerun_command(record) for record in group)), tabindex=0),
        el("pre", el("code", dump(group[0].config)), tabindex=0),
        table(["run", "SHA-256 of the trained model"], hashes),
    )


def rerun_command(record: RunRecord) -> str:
    """Return the command that repeats a run in another directory."""
    path = record.path if record.path.name not in ("", "..") else record.path.resolve()
    out = path.with_name(f"{path.name}-again")
    words = ["perdure", "run", str(path / "config.yaml"), "--out", str(out)]
    return shlex.join(words)
