"""Write the tables of renamed modules and names into docs/upgrade.md, from perdure.core.moved.

python tools/upgrade_tables.py
"""

from __future__ import annotations

import sys
from pathlib import Path

from perdure.core.moved import MODULES, NAMES

sys.path.insert(0, str(Path(__file__).parent))
from readme_table import with_table

PAGE = Path(__file__).resolve().parents[1] / "docs" / "upgrade.md"


def page(text: str) -> str:
    """Return the text of the page with its tables replaced."""
    modules = [f"| `{old}` | `{new}` |" for old, new in MODULES.items()]
    names = [
        f"| `{module}` | `{old}` | `{new}` |"
        for module, renamed in NAMES.items()
        for old, new in renamed.items()
    ]
    text = with_table(text, "modules", ["| 0.2 | 0.3 |", "|---|---|", *modules])
    head = ["| module (new path) | 0.2 | 0.3 |", "|---|---|---|"]
    return with_table(text, "names", [*head, *names])


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
