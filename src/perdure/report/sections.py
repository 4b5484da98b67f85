"""Sections of the report about single runs: configs, tasks, clients, what the server sees."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from perdure.config import dump
from perdure.privacy.secagg.layout import OVERHEAD
from perdure.report.axes import heat_level
from perdure.report.diagnostics import MethodLog
from perdure.report.figure_html import Html, el, scrollable, table
from perdure.report.records import RunRecord, Runs, differing_settings
from perdure.report.tables import format_bytes

# ------------------------------------------------------------------------------------------------
# The section of the page with the configs: where they differ, and how to repeat each run.
# ------------------------------------------------------------------------------------------------


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
    differing = differing_settings(heads)
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


# ------------------------------------------------------------------------------------------------
# The section on tasks: their names and classes.
# ------------------------------------------------------------------------------------------------

_MOST = 20
"""Classes of a task that are named."""


def task_table(runs: Runs) -> list[Html]:
    """Return the names and classes of the tasks; empty if no run has recorded them."""
    records = [record for record in runs.records if record.result.get("task_names")]
    if not records:
        return []
    first = records[0].result
    head = el("tr", *(el("th", name) for name in ("task", "name", "classes")))
    rows = (
        el("tr", el("th", str(number), scope="row"), el("td", name), el("td", _shown(classes)))
        for number, (name, classes) in enumerate(
            zip(first["task_names"], first["task_classes"], strict=True), 1
        )
    )
    made = el("table", el("thead", head), el("tbody", *rows))
    differ = any(record.result["task_classes"] != first["task_classes"] for record in records)
    note = f"Tasks of seed {first['seed']}; other runs have other ones." if differ else ""
    return [*([el("p", note, class_="note")] if note else []), scrollable(made, "tasks")]


def _shown(classes: list[str]) -> str:
    more = f", and {len(classes) - _MOST} more" if len(classes) > _MOST else ""
    return ", ".join(classes[:_MOST]) + more


# ------------------------------------------------------------------------------------------------
# The section on clients that the data names: how many training rows each holds in each task.
# ------------------------------------------------------------------------------------------------

_ABOUT = "Training rows that each client holds, as the data says; darker cells are more rows."


def client_rows(runs: Runs) -> list[Html]:
    """Return a shaded table of the rows by client and task; empty if the data names no clients."""
    known = next((r.result["clients"] for r in runs.records if r.result.get("clients")), None)
    if known is None:
        return []
    most = max((count for counts in known["rows"] for count in counts), default=0) or 1
    tasks = len(known["rows"][0]) if known["rows"] else 0
    head = el("tr", el("th", "client"), *(el("th", f"task {t + 1}") for t in range(tasks)))
    rows = (
        el("tr", el("th", name, scope="row"), *(_cell(count, most) for count in counts))
        for name, counts in zip(known["names"], known["rows"], strict=True)
    )
    shaded = el("table", el("thead", head), el("tbody", *rows), class_="heat")
    return [el("p", _ABOUT, class_="note"), scrollable(shaded, "rows of each client")]


def _cell(count: int, most: int) -> Html:
    return el("td", f"{count:,}", class_=f"h{heat_level(count / most)}")


# ------------------------------------------------------------------------------------------------
# The table of the bytes per client: by field and task, and what clients keep on disk.
# ------------------------------------------------------------------------------------------------

_NONE = "\u2013"
_ABOUT_BYTES = (
    "Bytes per client, by field and task: means over the clients that took part in the task, and "
    "the client with most. Kept: what a client stores after each task, over all clients. Means "
    "over seeds."
)
TaskBytes = Callable[[dict[str, Any]], float | None]
"""Returns a number of bytes, given the entry of one task in a result."""


def client_bytes(runs: Runs) -> list[Html]:
    """Return the table."""
    rows = [row for name, group in runs.groups.items() for row in _rows(name, group)]
    tasks = [f"task {task + 1}" for task in range(runs.records[0].tasks)]
    return [
        el("h4", "Bytes per client"), el("p", _ABOUT_BYTES, class_="note"),
        table(["method", "what", *tasks], rows, words=2),
    ]  # fmt: skip


def _rows(name: str, group: Sequence[RunRecord]) -> list[list[str]]:
    counted = [record.result["bytes"]["by_task"] for record in group]
    fields = dict.fromkeys(key for tasks in counted for task in tasks for key in task["by_field"])
    rows = [(f"{field} (mean)", _mean_of(field)) for field in fields]
    rows += [
        (f"{direction}, all fields ({what})", _total(direction, what))
        for direction in ("up", "down")
        for what in ("mean", "max")
    ]
    shown = [[name, what, *_cells(counted, value)] for what, value in rows]
    kept = [tasks for record in group if (tasks := _kept(record))]
    return shown + [
        [name, f"kept ({what})", *_cells(kept, _stored(what))] for what in ("mean", "max") if kept
    ]


def _kept(record: RunRecord) -> list[dict[str, Any]] | None:
    """Return what clients keep after each task, or None if some of it was not counted."""
    by_task = (record.result["bytes"]["kept"] or {}).get("by_task") or []
    return by_task if all(by_task) else None


def _mean_of(field: str) -> TaskBytes:
    def value(task: dict[str, Any]) -> float | None:
        count = task["by_field"].get(field)
        return None if count is None else count / max(1, task["per_client"]["clients"])

    return value


def _total(direction: str, what: str) -> TaskBytes:
    return lambda task: float(task["per_client"][direction][what])


def _stored(what: str) -> TaskBytes:
    return lambda task: float(task[what])


def _cells(runs: list[list[dict[str, Any]]], value: TaskBytes) -> list[str]:
    """Return one cell per task: the mean over the runs."""
    columns = ([value(task) for task in tasks] for tasks in zip(*runs, strict=True))
    return [_bytes_cell([number for number in column if number is not None]) for column in columns]


def _bytes_cell(numbers: list[float]) -> str:
    return format_bytes(fmean(numbers)) if numbers else _NONE


# ------------------------------------------------------------------------------------------------
# The table of rounds in which each client of a federation took part.
# ------------------------------------------------------------------------------------------------

_ABOUT_PARTICIPATION = (
    "Training rounds in which each client of a federation was sampled, its update counted, and it "
    "failed: without a reply, or with one that could not be used. A round continues without "
    "clients that fail if enough of them are left (federation.quorum)."
)
_COLUMNS = ("sampled", "counted", "failed")


def participation(runs: Runs) -> list[Html]:
    """Return the table; empty if no run was a federation that counted it."""
    rows = [
        row
        for name, group in runs.groups.items()
        for record in group
        for row in _participation_rows(name, record)
    ]
    if not rows:
        return []
    head = ["run", "client", *(f"rounds {name}" for name in _COLUMNS)]
    return [
        el("h3", "Participation"),
        el("p", _ABOUT_PARTICIPATION, class_="note"),
        table(head, rows, words=2),
    ]


def _participation_rows(name: str, record: RunRecord) -> list[list[str]]:
    counts: Mapping[str, Mapping[str, int]] = record.result.get("participation") or {}
    clients = sorted(counts, key=lambda client: (len(client), client))
    run = f"{name}, seed {record.seed}"
    return [
        [run, client, *(str(counts[client].get(column, 0)) for column in _COLUMNS)]
        for client in clients
    ]


# ------------------------------------------------------------------------------------------------
# The section of the page on what the server can see: sums, or the values of single clients.
# ------------------------------------------------------------------------------------------------

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
    return [
        el("p", "A field of an upload is a Sum or an Each. Of a Sum, the server needs only the "
           "weighted sum over clients, so secure aggregation can hide the value of each client. An "
           "Each must be visible to the server for every client."),
        el("ul", *verdicts),
        table(
            ["method", "field", "type", "the server needs", "bytes, all clients", "fraction"],
            rows, words=4,
        ),
        *_draws(runs),
        *_privacy(runs),
    ]  # fmt: skip


def verdict(record: RunRecord) -> str:
    """Return a sentence on what the server sees of the uploads of a method."""
    types: dict[str, str] = record.result["bytes"]["types"]
    each = sorted(name for name, kind in types.items() if kind == "Each")
    if not each:
        return f"needs only sums. {_secured(record)}"
    return f"the server must see every client's {', '.join(each)}; no secure aggregation."


def _secured(record: RunRecord) -> str:
    if (record.result.get("privacy") or {}).get("secagg"):
        return "Secure aggregation was on, so the server saw only sums."
    return "Secure aggregation was off, so in this run the server could see single updates."


def _fields(name: str, record: RunRecord) -> list[list[str]]:
    sent = record.result["bytes"]
    types = {**sent["types"], OVERHEAD: "protocol"}
    up = {key.removeprefix("up/"): n for key, n in sent["by_field"].items() if key[:3] == "up/"}
    return [
        [name, field, types[field], _NEEDS[types[field]],
         format_bytes(count), f"{count / max(1, sent['up']):.1%}"]
        for field, count in sorted(up.items(), key=lambda item: -item[1])
    ]  # fmt: skip


def _draws(runs: Runs) -> list[Html]:
    """Return where the draws of runs came from."""
    texts = {group[0].result["draws"] for group in runs.groups.values()}
    return [el("p", f"Random draws: {text}.") for text in sorted(texts)]


def _privacy(runs: Runs) -> list[Html]:
    """Return the guarantees of secure aggregation and noise of the runs that used them."""
    rows, guarantees = [], []
    for name, group in runs.groups.items():
        privacy = group[0].result.get("privacy") or {}
        if privacy.get("epsilon") is not None:
            rows.append([name, *(_format(privacy.get(key)) for key in _NOISE)])
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


def _format(value: Any) -> str:
    if value is None:
        return "\u2013"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
