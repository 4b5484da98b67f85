"""The files with the tables of a comparison."""

from __future__ import annotations

from perdure.contract.evaluation import MODES
from perdure.report.comparison import Comparison
from perdure.report.comparison_latex import latex_tables
from perdure.report.comparison_text import to_csv, to_markdown
from perdure.report.table_style import TableStyle

_OWN = [f"table-{mode}{end}.tex" for mode in (*MODES, "cost") for end in ("", "-forgetting")]
OWN_NAMES = ("table.tex", *_OWN)
"""Names of LaTeX files that a comparison may have written; those of older tables are deleted."""


def table_files(comparison: Comparison, style: TableStyle | None = None) -> dict[str, str]:
    """Return the text of every file by its name.

    table.csv has all measures with all digits; the others follow `style`.
    """
    return {
        "table.csv": to_csv(comparison),
        "table.md": to_markdown(comparison, style),
        **latex_tables(comparison, style),
    }
