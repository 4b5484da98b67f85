"""The section on clients that the data names: how many training rows each holds in each task."""

from __future__ import annotations

from perdure.report.figure_html import scrollable
from perdure.report.markup import Html, el
from perdure.report.palette import heat_level
from perdure.report.run_records import Runs

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
