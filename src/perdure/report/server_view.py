"""The section of the page on what the server can see: sums, or the values of single clients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from perdure.privacy.secagg.sizes import OVERHEAD
from perdure.report.comparison_text import format_bytes
from perdure.report.diagnostics import MethodLog
from perdure.report.figure_html import table
from perdure.report.markup import Html, el
from perdure.report.run_records import RunRecord, Runs

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
