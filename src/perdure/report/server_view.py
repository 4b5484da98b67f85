"""What the server could see of the clients, by method: sums, or every client's own values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from perdure.privacy.secure_collector import OVERHEAD
from perdure.report.comparison_text import format_bytes
from perdure.report.diagnostics import MethodLog
from perdure.report.figure_html import table
from perdure.report.markup import Html, el
from perdure.report.run_records import RunRecord, Runs

_NEEDS = {
    "Sum": "the weighted sum over clients",
    "Each": "every client's own value",
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
"""Keys of a run's privacy account, and what the columns are called."""


def server_view(runs: Runs) -> list[Html]:
    """The section: a verdict and the fields of each method, and what noise guarantees."""
    rows = [row for name, group in runs.groups.items() for row in _fields(name, group[0])]
    verdicts = (
        el("li", el("strong", name), ": ", verdict(group[0])) for name, group in runs.groups.items()
    )
    return [
        el("p", "A field of an upload is a Sum, of which the server needs nothing but the weighted "
           "sum, so that secure aggregation can hide each client's part, or an Each, which the "
           "server has to see client by client."),
        el("ul", *verdicts),
        table(
            ["method", "field", "type", "the server needs", "bytes, all clients", "share"],
            rows, words=4,
        ),
        *_privacy(runs),
    ]  # fmt: skip


def verdict(record: RunRecord) -> str:
    """One sentence on a method."""
    types: dict[str, str] = record.result["bytes"].get("types") or {}
    each = sorted(name for name, kind in types.items() if kind == "Each")
    if not types:
        return "the types of its fields were not recorded."
    if not each:
        return f"needs only sums. {_secured(record)}"
    return f"the server must see every client's {', '.join(each)}; secure aggregation is refused."


def _secured(record: RunRecord) -> str:
    if (record.result.get("privacy") or {}).get("secagg"):
        return "Secure aggregation was on: sums are all that it saw."
    return "Secure aggregation was off, so in this run it could have looked at single updates."


def _fields(name: str, record: RunRecord) -> list[list[str]]:
    sent = record.result["bytes"]
    types = {**(sent.get("types") or {}), OVERHEAD: "protocol"}
    up = {key.removeprefix("up/"): n for key, n in sent["by_field"].items() if key[:3] == "up/"}
    return [
        [name, field, types.get(field, "not recorded"), _NEEDS.get(types.get(field, ""), "\u2013"),
         format_bytes(count), f"{count / max(1, sent['up']):.1%}"]
        for field, count in sorted(up.items(), key=lambda item: -item[1])
    ]  # fmt: skip


def _privacy(runs: Runs) -> list[Html]:
    """What secure aggregation and noise guarantee, where a run had them."""
    rows, claims = [], []
    for name, group in runs.groups.items():
        found = group[0].result.get("privacy") or {}
        if found.get("epsilon") is not None:
            rows.append([name, *(_plain(found.get(key)) for key in _NOISE)])
        claims += [el("li", el("strong", name), ": ", text) for text in _claims(group, found)]
    made = []
    if rows:
        made += [table(["method", *_NOISE.values()], rows)]
    if claims:
        made += [el("ul", *claims)]
    return [el("h3", "Privacy: what is covered and what is not"), *made] if made else []


def _claims(group: Sequence[RunRecord], found: dict[str, Any]) -> list[str]:
    """What the noise covers in words, from the run's account and from the method's own."""
    said = [found[key] for key in ("claim", "covers") if isinstance(found.get(key), str)]
    for ends, part in reversed(MethodLog(group[0]).lines):
        if ends and isinstance(part.get("privacy"), str):
            return [*said, part["privacy"]]
    return said


def _plain(value: Any) -> str:
    if value is None:
        return "\u2013"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
