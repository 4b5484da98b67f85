"""Write the tables of docs/measured into the pages that show them.

    python -m tools.results_pages

A table stands between <!-- figures: docs/measured/NAME.json --> and <!-- /figures -->.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tools import measure_clip, measure_robust
from tools.record_campaigns import totals
from tools.results import MEASURED, ROOT, block, with_block


def _runs(table: Callable[[Any], str], name: str) -> str:
    return table(json.loads((MEASURED / f"{name}.json").read_text(encoding="utf-8"))["runs"])


TABLES: dict[tuple[str, str], Callable[[], str]] = {
    ("docs/security.md", "robust"): lambda: _runs(measure_robust.table, "robust"),
    ("docs/security.md", "fuzz"): lambda: totals("fuzz"),
    ("docs/security.md", "faults"): lambda: totals("faults"),
    ("docs/privacy.md", "clip"): lambda: _runs(measure_clip.table, "clip"),
}
"""By page and name of the results file."""


def outdated_tables() -> list[str]:
    """Return the tables that are not those of their results files."""
    return [
        f"{page}: {name}"
        for (page, name), table in TABLES.items()
        if block(name, table()) not in (ROOT / page).read_text(encoding="utf-8")
    ]


def main() -> None:
    """Rewrite the tables."""
    for (page, name), table in TABLES.items():
        path = ROOT / page
        text = with_block(path.read_text(encoding="utf-8"), name, table())
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
