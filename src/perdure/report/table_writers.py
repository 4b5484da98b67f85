"""Writers of a comparison's tables: HTML for a notebook, CSV, Markdown, and LaTeX for papers."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from perdure.core.notebook import html_table
from perdure.core.registry import require
from perdure.core.text import csv_text, printable
from perdure.evaluation.evaluator import MODES
from perdure.report.tables import (
    NOTE,
    Column,
    Table,
    TableCell,
    TableRow,
    TableStyle,
    all_tables,
    main_names,
    measures_table,
    short_tables,
    table_sections,
)

if TYPE_CHECKING:
    from perdure.report.comparison import Comparison, Measure

# ---- A comparison in a notebook: one line, tables as HTML, and a data frame


def comparison_line(comparison: Comparison) -> str:
    """Return what is compared, in one line."""
    labels = comparison.labels
    counts = [comparison.seed_count(label, comparison.measures) for label in labels]
    shown = ", ".join(labels[:6]) + (f" and {len(labels) - 6} more" if len(labels) > 6 else "")
    return f"{shown}; {max(counts, default=0)} seeds"


def comparison_html(comparison: Comparison, style: TableStyle | None = None) -> str:
    """Return one table per inference mode and one of the costs, with main or chosen measures."""
    tables = short_tables(comparison, style)
    return "".join(html_table(table.title, *table.texts()) for table in tables)


def comparison_frame(comparison: Comparison) -> Any:
    """Return a data frame with one row per method and measure, as in table.csv."""
    pandas = require("pandas", "to_frame", "notebook")
    return pandas.DataFrame(csv_rows(comparison), columns=CSV_TITLES)


CSV_TITLES = [
    "method", "mode", "measure", "unit", "n", "mean", "std", "difference", "low", "high", "pairs",
    "definition",
]  # fmt: skip


def to_csv(comparison: Comparison) -> str:
    """Return CSV with one line per method and measure, with all digits.

    A label that a spreadsheet would take for a formula gets a leading '.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(CSV_TITLES)
    for row in csv_rows(comparison):
        writer.writerow([csv_text(cell) if isinstance(cell, str) else cell for cell in row])
    return text.getvalue()


def csv_rows(comparison: Comparison) -> list[list[object]]:
    """Return the rows below `CSV_TITLES`: one per method and measure."""
    return [
        _csv_row(comparison, label, measure)
        for label in comparison.labels
        for measure in comparison.measures
    ]


def to_markdown(comparison: Comparison, style: TableStyle | None = None) -> str:
    """Return one Markdown table per inference mode and one of the costs, with the definitions."""
    parts = [f"{NOTE} The first method is {comparison.reference}.", *comparison.notes]
    for table in all_tables(comparison, style):
        parts.append(f"### {table.title}")
        parts.append("\n".join(_markdown_lines(*table.texts())))
    parts.append(
        "\n".join(f"- {name}: {meaning}" for name, meaning in _meanings(comparison, style).items())
    )
    return printable("\n\n".join(parts)) + "\n"


def _csv_row(comparison: Comparison, label: str, measure: Measure) -> list[object]:
    cell = comparison.cell(label, measure.key)
    begin: list[object] = [label, measure.mode or "", measure.name, measure.unit]
    if cell is None:
        return [*begin, 0, *[None] * 6, measure.meaning]
    gaps = cell.difference
    values = [gaps.mean, gaps.low, gaps.high, gaps.count] if gaps else [None] * 4
    return [
        *begin,
        cell.summary.count,
        cell.summary.mean,
        cell.summary.std,
        *values,
        measure.meaning,
    ]


def _markdown_lines(header: list[str], rows: list[list[str]]) -> Iterable[str]:
    yield f"| {' | '.join(header)} |"
    yield f"|---|{'---:|' * (len(header) - 1)}"
    for row in rows:
        yield f"| {' | '.join(text.replace('|', chr(92) + '|') for text in row)} |"


def _meanings(comparison: Comparison, style: TableStyle | None) -> dict[str, str]:
    shown = (style or TableStyle()).choose([m for m in comparison.measures if m.task is None])
    return {measure.name: measure.meaning for measure in shown}


# ---- LaTeX with booktabs that fits into one column of two
#
# The best method of a column is bold and the second is underlined; references are not ranked. A
# table that is wider than a column continues below.

COLUMN_POINTS = 234.0
"""Width of the narrowest column of usual two-column papers, in TeX points."""
_LABEL_POINTS = 84.0
"""Labels that are longer are broken into lines."""
_GAP = 3.0
"""Half of the space between two columns."""
_LETTER, _DIGIT, _SMALL, _SIGN = 5.2, 5.4, 4.1, 8.0
"""Widths of a letter, of a bold digit, of a digit of a deviation, and of an arrow or sign."""
_SIGNS = {
    "\\": r"\textbackslash{}", "±": r"$\pm$", "~": r"\textasciitilde{}", "^": r"\^{}",
    "<": "$<$", ">": "$>$", "|": "$|$",
} | {sign: f"\\{sign}" for sign in "&%$#_{}"}  # fmt: skip
_MARKS = {"best": r"\textbf{%s}", "second": r"\underline{%s}"}
_ARROWS = {"higher": r"~$\uparrow$", "lower": r"~$\downarrow$", None: ""}


def latex_tables(comparison: Comparison, style: TableStyle | None = None) -> dict[str, str]:
    """Return the LaTeX of every table by the name of its file, such as table-task_agnostic.tex."""
    style = style or TableStyle()
    files = {}
    for title, mode in table_sections(comparison):
        names = main_names(comparison, mode)
        tables = {"": style.choose(comparison.measures_of(mode), names)}
        if mode is not None and not style.metrics:
            tables["-forgetting"] = comparison.measures_by_task(mode)
        for end, measures in tables.items():
            if measures:
                table = measures_table(comparison, measures, percent=style.percent, title=title)
                text = "\n".join(_file(table, comparison.notes))
                files[f"table-{mode or 'cost'}{end}.tex"] = text + "\n"
    return files


def _file(table: Table, notes: Sequence[str]) -> Iterator[str]:
    yield from (f"% {line}" for line in (table.title, NOTE, *notes))
    yield "% Best in bold, second underlined. Needs \\usepackage{booktabs}."
    yield f"\\begingroup\\small\\setlength{{\\tabcolsep}}{{{_GAP:g}pt}}%"
    for number, part in enumerate(_parts(table)):
        if number:
            yield "\n\\medskip"
        yield from _tabular(table, part)
    yield "\\endgroup"


def _parts(table: Table) -> Iterator[list[int]]:
    """Yield the columns of each part, which is as wide as a column of text or has one column."""
    begin = _label_width(table)
    if _shows_counts(table):
        begin += max(len(str(row.count)) for row in table.rows) * _DIGIT + 2 * _GAP
    part: list[int] = []
    width = begin
    for number, column in enumerate(table.columns):
        cells = [row.cells[number] for row in table.rows]
        wanted = _width(column, cells) + 2 * _GAP
        if part and width + wanted > COLUMN_POINTS:
            yield part
            part, width = [], begin
        part.append(number)
        width += wanted
    yield part


def _width(column: Column, cells: Sequence[TableCell]) -> float:
    """Return the estimated width of a column."""
    title = len(column.title) * _LETTER + (_SIGN + _LETTER if column.better else 0.0)
    widths = [
        len(cell.text) * _DIGIT
        + (len(cell.spread[0]) * _SMALL + _SIGN + 2.0 if cell.spread else 0.0)
        for cell in cells
    ]
    return max([title, *widths])


def _tabular(table: Table, part: Sequence[int]) -> Iterator[str]:
    """Yield the lines of a part."""
    columns = [table.columns[number] for number in part]
    first = ["method", *(["$n$"] if _shows_counts(table) else [])]
    yield f"\\begin{{tabular}}{{@{{}}l{'r' * (len(first) - 1 + len(part))}@{{}}}}"
    yield "\\toprule"
    titles = [escape(column.title) + _ARROWS[column.better] for column in columns]
    yield " & ".join([*first, *titles]) + r" \\"
    yield "\\midrule"
    width = _label_width(table)
    references = [row for row in table.rows if row.is_reference]
    for row in table.rows:
        if references and row is references[0]:
            yield "\\midrule"
        count = [str(row.count)] if _shows_counts(table) else []
        cells = [_cell(row.cells[number]) for number in part]
        yield " & ".join([_label(row, width), *count, *cells]) + r" \\"
    yield "\\bottomrule"
    yield "\\end{tabular}"


def _cell(cell: TableCell) -> str:
    text = _MARKS.get(cell.mark, "%s") % escape(cell.text)
    return text + (f"{{\\scriptsize$\\,\\pm\\,${escape(cell.spread[0])}}}" if cell.spread else "")


def _shows_counts(table: Table) -> bool:
    return len({row.count for row in table.rows}) > 1


def _label(row: TableRow, width: float) -> str:
    """Return the name of a method, which is broken into lines if it is long."""
    if len(row.label) * _LETTER <= _LABEL_POINTS:
        return escape(row.label)
    broken = re.sub(r"(?<=[._=])", "\\\\allowbreak{}", escape(row.label))
    return f"\\parbox[t]{{{width:.0f}pt}}{{\\raggedright {broken}}}"


def _label_width(table: Table) -> float:
    """Return the width of the labels, which are broken after signs."""
    labels = [row.label for row in table.rows]
    longest = max(len(label) for label in ("method", *labels)) * _LETTER
    words = [part for label in labels for part in re.split(r"[-._=]", label)]
    word = max((len(part) + 1 for part in words), default=0)
    return min(longest, max(_LABEL_POINTS, word * _LETTER))


def escape(text: str) -> str:
    """Return text in which no sign is a command of LaTeX or of a terminal."""
    return "".join(_SIGNS.get(letter, letter) for letter in printable(text))


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
