"""Sections of the report about single runs: configs, tasks, clients, what the server sees."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from perdure.config import dump
from perdure.privacy.secagg.layout import OVERHEAD
from perdure.report.axes import heat_level
from perdure.report.diagnostics import MethodLog
from perdure.report.figure_html import Html, el, scrollable, table
from perdure.report.records import RunRecord, Runs, differing_settings
from perdure.report.tables import format_bytes

# ---- The section of the page with the configs: where they differ, and how to repeat each run


def config_section(runs: Runs) -> list[Html]:
    """Return the differences between the configs and, per method, its config and commands."""
    return [*_differences(runs), *(_setup(name, group) for name, group in runs.groups.items())]


def page_title(runs: Runs) -> str:
    """Return the title of the page: methods, stream, data and seeds."""
    methods, first = len(runs.groups), runs.records[0]
    seeds = max(len(group) for group in runs.groups.values())
    subject = f"{methods} methods" if methods > 1 else next(iter(runs.groups))
    many = f", {seeds} seeds" if seeds > 1 else f", seed {first.seed}"
    of_nodes = all(record.config.federation is not None for record in runs.records)
    data = "data of nodes" if of_nodes else _common(runs, "data.source")
    return f"{subject} on {_common(runs, 'stream.kind')} {data}{many}"


def settings_sentence(runs: Runs) -> str:
    """Return a sentence on the settings that all runs have in common."""
    first = runs.records[0]
    of_nodes = all(record.config.federation is not None for record in runs.records)
    partition = "" if of_nodes else f" ({_common(runs, 'clients.partition.kind')})"
    parts = [
        f"{first.tasks} tasks" if first.tasks > 1 else "1 task",
        _counted(runs, "clients.count", "client") + partition,
        f"model {_common(runs, 'model.kind')}",
        f"{_counted(runs, 'train.rounds', 'round').lstrip('[').replace(']', ', ...')} per task",
        _counted(runs, "train.local_epochs", "local epoch"),
        f"batches of {_common(runs, 'train.batch_size')}",
        f"{_common(runs, 'train.optimizer.kind')} with learning rate {_common(runs, 'train.lr')}",
    ]
    return ", ".join(parts) + "."


def _common(runs: Runs, key: str) -> str:
    values = {str(record.settings.get(key)) for record in runs.records}
    return values.pop() if len(values) == 1 else "different"


def _counted(runs: Runs, key: str, thing: str) -> str:
    number = _common(runs, key)
    return f"{number} {thing}" if number == "1" else f"{number} {thing}s"


def _differences(runs: Runs) -> list[Html]:
    """Return a table of the settings that are not equal in all groups."""
    heads = [group[0] for group in runs.groups.values()]
    differing = differing_settings(heads)
    if not differing:
        return []
    rows = []
    for key in differing:
        values = [record.setting(key) for record in heads]
        rows.append([el("code", key), *(_NONE if v is None else str(v) for v in values)])
    return [
        el("p", "Settings in which the methods differ; all others are equal."),
        table(["key", *runs.groups], rows),
    ]


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


# ---- The section on tasks: their names and classes

_NONE = "\u2013"
_MOST = 20
"""Classes of a task that are named."""


def task_table(runs: Runs) -> list[Html]:
    """Return the names and classes of the tasks; empty if no run has recorded them."""
    records = [record for record in runs.records if record.result.get("task_names")]
    if not records:
        return []
    first = records[0].result
    head = el("tr", *(el("th", name) for name in ("task", "name", "classes")))
    rows = []
    named = zip(first["task_names"], first["task_classes"], strict=True)
    for number, (name, classes) in enumerate(named, 1):
        more = f", and {len(classes) - _MOST} more" if len(classes) > _MOST else ""
        shown = el("td", ", ".join(classes[:_MOST]) + more)
        rows.append(el("tr", el("th", str(number), scope="row"), el("td", name), shown))
    made = el("table", el("thead", head), el("tbody", *rows))
    differ = any(record.result["task_classes"] != first["task_classes"] for record in records)
    note = f"Tasks of seed {first['seed']}; other runs have other ones." if differ else ""
    return [*([el("p", note, class_="note")] if note else []), scrollable(made, "tasks")]


# ---- The section on clients that the data names: how many training rows each holds in each task

_ABOUT = "Training rows that each client holds, as the data says; darker cells are more rows."


def client_rows(runs: Runs) -> list[Html]:
    """Return a shaded table of the rows by client and task; empty if the data names no clients."""
    known = next((r.result["clients"] for r in runs.records if r.result.get("clients")), None)
    if known is None:
        return []
    most = max((count for counts in known["rows"] for count in counts), default=0) or 1
    tasks = len(known["rows"][0]) if known["rows"] else 0
    head = el("tr", el("th", "client"), *(el("th", f"task {t + 1}") for t in range(tasks)))
    rows = []
    for name, counts in zip(known["names"], known["rows"], strict=True):
        cells = [el("td", f"{n:,}", class_=f"h{heat_level(n / most)}") for n in counts]
        rows.append(el("tr", el("th", name, scope="row"), *cells))
    shaded = el("table", el("thead", head), el("tbody", *rows), class_="heat")
    return [el("p", _ABOUT, class_="note"), scrollable(shaded, "rows of each client")]


# ---- The table of the bytes per client: by field and task, and what clients keep on disk

_ABOUT_BYTES = (
    "Bytes per client, by field and task: means over the clients that took part in the task, and "
    "the client with most. Kept: what a client stores after each task, over all clients. Means "
    "over seeds."
)


def client_bytes(runs: Runs) -> list[Html]:
    """Return the table."""
    rows = [row for name, group in runs.groups.items() for row in _rows(name, group)]
    tasks = [f"task {task + 1}" for task in range(runs.records[0].tasks)]
    return [
        el("h4", "Bytes per client"), el("p", _ABOUT_BYTES, class_="note"),
        table(["method", "what", *tasks], rows, words=2),
    ]  # fmt: skip


def _rows(name: str, group: Sequence[RunRecord]) -> list[list[str]]:
    """Return a row per field, per direction, and of what is kept, with a cell per task."""
    counted = [record.result["bytes"]["by_task"] for record in group]
    by_task = list(zip(*counted, strict=True))
    fields = dict.fromkeys(key for tasks in counted for task in tasks for key in task["by_field"])
    values: dict[str, list[list[float]]] = {}
    for field in fields:
        values[f"{field} (mean)"] = [
            [task["by_field"][field] / max(1, task["per_client"]["clients"])
             for task in tasks if field in task["by_field"]]
            for tasks in by_task
        ]  # fmt: skip
    for direction in ("up", "down"):
        for what in ("mean", "max"):
            values[f"{direction}, all fields ({what})"] = [
                [task["per_client"][direction][what] for task in tasks] for tasks in by_task
            ]
    kept = [(record.result["bytes"]["kept"] or {}).get("by_task") or [] for record in group]
    counted_kept = [tasks for tasks in kept if tasks and all(tasks)]  # some are not counted
    for what in ("mean", "max") if counted_kept else ():
        values[f"kept ({what})"] = [
            [task[what] for task in tasks] for tasks in zip(*counted_kept, strict=True)
        ]
    return [
        [name, what, *(format_bytes(fmean(numbers)) if numbers else _NONE for numbers in by_task)]
        for what, by_task in values.items()
    ]


# ---- The table of rounds in which each client of a federation took part

_ABOUT_PARTICIPATION = (
    "Training rounds in which each client of a federation was sampled, its update counted, and it "
    "failed: without a reply, or with one that could not be used. A round continues without "
    "clients that fail if enough of them are left (federation.quorum)."
)
_COLUMNS = ("sampled", "counted", "failed")


def participation(runs: Runs) -> list[Html]:
    """Return the table; empty if no run was a federation that counted it."""
    rows = []
    for name, group in runs.groups.items():
        for record in group:
            counts: Mapping[str, Mapping[str, int]] = record.result.get("participation") or {}
            for client in sorted(counts, key=lambda client: (len(client), client)):
                numbers = [str(counts[client].get(column, 0)) for column in _COLUMNS]
                rows.append([f"{name}, seed {record.seed}", client, *numbers])
    if not rows:
        return []
    head = ["run", "client", *(f"rounds {name}" for name in _COLUMNS)]
    return [
        el("h3", "Participation"),
        el("p", _ABOUT_PARTICIPATION, class_="note"),
        table(head, rows, words=2),
    ]


# ---- The section of the page on what the server can see: sums, or the values of single clients

_NEEDS = {
    "Sum": "the weighted sum over clients",
    "Each": "the value of every client",
    "protocol": "keys and shares of secure aggregation",
}

_NOISE = {
    "epsilon": "epsilon",
    "epsilon_sampled": "epsilon, sample secret",
    "delta": "delta",
    "clip": "clipping norm",
    "noise": "noise (norms)",
    "mode": "mode",
}
"""Keys of the privacy summary in result.json, and the titles of their columns."""


def server_view(runs: Runs) -> list[Html]:
    """Return a verdict and the upload fields of each method, and its privacy guarantees."""
    rows = [row for name, group in runs.groups.items() for row in _fields(name, group[0])]
    verdicts = (
        el("li", el("strong", name), ": ", verdict(group[0])) for name, group in runs.groups.items()
    )
    draws = sorted({group[0].result["draws"] for group in runs.groups.values()})
    return [
        el("p", "A field of an upload is a Sum or an Each. Of a Sum, the server needs only the "
           "weighted sum over clients, so secure aggregation can hide the value of each client. An "
           "Each must be visible to the server for every client."),
        el("ul", *verdicts),
        table(
            ["method", "field", "type", "the server needs", "bytes, all clients", "fraction"],
            rows, words=4,
        ),
        *(el("p", f"Random draws: {text}.") for text in draws),
        *_privacy(runs),
    ]  # fmt: skip


def verdict(record: RunRecord) -> str:
    """Return a sentence on what the server sees of the uploads of a method."""
    types: dict[str, str] = record.result["bytes"]["types"]
    each = sorted(name for name, kind in types.items() if kind == "Each")
    if not each and (record.result.get("privacy") or {}).get("secagg"):
        return "needs only sums. Secure aggregation was on, so the server saw only sums."
    if not each:
        return (
            "needs only sums. Secure aggregation was off, so in this run the server could see "
            "single updates."
        )
    return f"the server must see every client's {', '.join(each)}; no secure aggregation."


def _fields(name: str, record: RunRecord) -> list[list[str]]:
    sent = record.result["bytes"]
    types = {**sent["types"], OVERHEAD: "protocol"}
    up = {key.removeprefix("up/"): n for key, n in sent["by_field"].items() if key[:3] == "up/"}
    return [
        [name, field, types[field], _NEEDS[types[field]],
         format_bytes(count), f"{count / max(1, sent['up']):.1%}"]
        for field, count in sorted(up.items(), key=lambda item: -item[1])
    ]  # fmt: skip


def _privacy(runs: Runs) -> list[Html]:
    """Return the guarantees of secure aggregation and noise of the runs that used them."""
    rows, guarantees = [], []
    for name, group in runs.groups.items():
        privacy = group[0].result.get("privacy") or {}
        if privacy.get("epsilon") is not None:
            values = [privacy.get(key) for key in _NOISE]
            shown = [f"{v:.4g}" if isinstance(v, float) else str(v) for v in values]
            rows.append([name, *(_NONE if text == "None" else text for text in shown)])
        texts = _guarantees(group, privacy)
        guarantees += [el("li", el("strong", name), ": ", text) for text in texts]
    content = []
    if rows:
        content += [table(["method", *_NOISE.values()], rows)]
    if guarantees:
        content += [el("ul", *guarantees)]
    return [el("h3", "Privacy: what is covered and what is not"), *content] if content else []


def _guarantees(group: Sequence[RunRecord], privacy: dict[str, Any]) -> list[str]:
    """Return the guarantees in words: of the privacy summary, and of the method itself."""
    texts = [privacy[key] for key in ("claim", "covers") if isinstance(privacy.get(key), str)]
    for is_task_end, values in reversed(MethodLog(group[0]).entries):
        if is_task_end and isinstance(values.get("privacy"), str):
            return [*texts, values["privacy"]]
    return texts
