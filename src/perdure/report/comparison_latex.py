"""Comparison tables for papers: LaTeX with booktabs, and the files with all tables."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from perdure.core.text import printable
from perdure.evaluation.evaluator import MODES
from perdure.report.comparison import Comparison, Measure
from perdure.report.comparison_text import (
    NOTE,
    TableStyle,
    format_value,
    main_names,
    measure_title,
    table_sections,
    to_csv,
    to_markdown,
)

# ------------------------------------------------------------------------------------------------
# Comparison tables for papers: LaTeX with booktabs that fits into one column of two.
#
# The best method of a column is bold and the second is underlined; references are not ranked. A
# table that is wider than a column continues below.
# ------------------------------------------------------------------------------------------------

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
                text = "\n".join(_file(comparison, style, title, measures))
                files[f"table-{mode or 'cost'}{end}.tex"] = text + "\n"
    return files


def _file(
    comparison: Comparison, style: TableStyle, title: str, measures: Sequence[Measure]
) -> Iterator[str]:
    yield from (f"% {line}" for line in (title, NOTE, *comparison.notes))
    yield "% Best in bold, second underlined. Needs \\usepackage{booktabs}."
    table = _Table(comparison, style, measures)
    yield f"\\begingroup\\small\\setlength{{\\tabcolsep}}{{{_GAP:g}pt}}%"
    for part, columns in enumerate(table.parts()):
        if part:
            yield "\n\\medskip"
        yield from table.tabular(columns)
    yield "\\endgroup"


class _Table:
    """One table, whose columns are measures."""

    def __init__(
        self, comparison: Comparison, style: TableStyle, measures: Sequence[Measure]
    ) -> None:
        self.comparison, self.style, self.measures = comparison, style, measures
        counts = {label: comparison.seed_count(label, measures) for label in comparison.labels}
        self.counts = {label: count for label, count in counts.items() if count}
        self.labels = list(self.counts)

    def parts(self) -> Iterator[list[Measure]]:
        """Yield the measures of each part, which is as wide as a column or has one measure."""
        begin = self._label_width() + (self._count_width() if self._shows_counts() else 0.0)
        part: list[Measure] = []
        width = begin
        for measure in self.measures:
            wanted = self._width(measure) + 2 * _GAP
            if part and width + wanted > COLUMN_POINTS:
                yield part
                part, width = [], begin
            part.append(measure)
            width += wanted
        yield part

    def tabular(self, measures: Sequence[Measure]) -> Iterator[str]:
        """Yield the lines of a part."""
        first = ["method", *(["$n$"] if self._shows_counts() else [])]
        yield f"\\begin{{tabular}}{{@{{}}l{'r' * (len(first) - 1 + len(measures))}@{{}}}}"
        yield "\\toprule"
        yield _line([*first, *(self._title(measure) for measure in measures)])
        yield "\\midrule"
        ranks = {measure.key: self._ranks(measure) for measure in measures}
        for label in self.labels:
            if label in self.comparison.references and label == self._first_reference():
                yield "\\midrule"
            count = [str(self.counts[label])] if self._shows_counts() else []
            cells = [self._cell(measure, label, ranks[measure.key]) for measure in measures]
            yield _line([self._label(label), *count, *cells])
        yield "\\bottomrule"
        yield "\\end{tabular}"

    def _first_reference(self) -> str | None:
        return next((name for name in self.labels if name in self.comparison.references), None)

    def _shows_counts(self) -> bool:
        return len(set(self.counts.values())) > 1

    def _title(self, measure: Measure) -> str:
        return escape(measure_title(measure, self.style.percent)) + _ARROWS[measure.better]

    def _cell(self, measure: Measure, label: str, ranks: dict[str, str]) -> str:
        mean, spread = self._texts(measure, label)
        text = ranks.get(label, "%s") % escape(mean)
        return text + (f"{{\\scriptsize$\\,\\pm\\,${escape(spread)}}}" if spread else "")

    def _texts(self, measure: Measure, label: str) -> tuple[str, str]:
        """Return the mean and the deviation of a cell; an empty text if there is none."""
        cell = self.comparison.cell(label, measure.key)
        if cell is None:
            return "-", ""
        mean = format_value(measure, cell.summary.mean, self.style.percent)
        std = cell.summary.std
        if std is None or (measure.unit == "bytes" and std == 0):
            return mean, ""
        return mean, format_value(measure, std, self.style.percent)

    def _ranks(self, measure: Measure) -> dict[str, str]:
        """Return the markup of the best and the second method; equal texts share a rank."""
        methods = [name for name in self.labels if name not in self.comparison.references]
        cells = {
            name: cell for name in methods if (cell := self.comparison.cell(name, measure.key))
        }
        texts = {name: self._texts(measure, name)[0] for name in cells}
        means = {texts[name]: cell.summary.mean for name, cell in cells.items()}
        if measure.better is None or len(means) < 2:
            return {}
        order = sorted(means, key=lambda text: means[text], reverse=measure.better == "higher")
        marks = dict(zip(order[:2], ("\\textbf{%s}", "\\underline{%s}"), strict=True))
        return {name: marks[text] for name, text in texts.items() if text in marks}

    # ---- widths, estimated

    def _label(self, label: str) -> str:
        if len(label) * _LETTER <= _LABEL_POINTS:
            return escape(label)
        broken = re.sub(r"(?<=[._=])", "\\\\allowbreak{}", escape(label))
        return f"\\parbox[t]{{{self._label_width():.0f}pt}}{{\\raggedright {broken}}}"

    def _label_width(self) -> float:
        """Return the width of the labels, which are broken after signs."""
        longest = max((len(label) for label in ("method", *self.labels)), default=0) * _LETTER
        words = [part for name in self.labels for part in re.split(r"[-._=]", name)]
        word = max((len(part) + 1 for part in words), default=0)
        return min(longest, max(_LABEL_POINTS, word * _LETTER))

    def _count_width(self) -> float:
        return max(len(str(count)) for count in self.counts.values()) * _DIGIT + 2 * _GAP

    def _width(self, measure: Measure) -> float:
        title = len(measure_title(measure, self.style.percent)) * _LETTER
        title += _SIGN + _LETTER if measure.better else 0.0
        return max([title, *(self._cell_width(measure, label) for label in self.labels)])

    def _cell_width(self, measure: Measure, label: str) -> float:
        mean, spread = self._texts(measure, label)
        return len(mean) * _DIGIT + (len(spread) * _SMALL + _SIGN + 2.0 if spread else 0.0)


def escape(text: str) -> str:
    """Return text in which no sign is a command of LaTeX or of a terminal."""
    return "".join(_SIGNS.get(letter, letter) for letter in printable(text))


def _line(cells: Sequence[str]) -> str:
    return " & ".join(cells) + r" \\"


# ------------------------------------------------------------------------------------------------
# The files with the tables of a comparison.
# ------------------------------------------------------------------------------------------------

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
