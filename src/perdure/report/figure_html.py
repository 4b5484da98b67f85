"""Figures and tables as parts of the page, each with its caption and its numbers in a table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from perdure.report.figure_data import Cell, Figure, HeatMap, HeatMapFigure, LineFigure
from perdure.report.markup import Content, Html, el
from perdure.report.palette import LEVELS, heat_level
from perdure.report.statistics import Summary
from perdure.report.svg_charts import legend_mark, line_chart


def figure_html(what: Figure) -> Html:
    """A figure with its title, caption and data."""
    body = _heats(what) if isinstance(what, HeatMapFigure) else _lines(what)
    wide = "wide" if isinstance(what, HeatMapFigure) and len(what.panels) > 1 else None
    heading = f"{what.key}-heading"
    return el(
        "figure",
        el("h3", what.title, id=heading),
        *body,
        el("figcaption", what.caption),
        *([_data(what)] if isinstance(what, LineFigure) else []),
        id=f"figure-{what.key}",
        class_=wide,
        aria_labelledby=heading,
    )


def table(head: Sequence[Content], rows: Iterable[Sequence[Content]], words: int = 1) -> Html:
    """A table that scrolls by itself where it is too wide; the first cell of a row names it.

    `words`: so many columns hold words and begin at the left, the others are numbers.
    """
    titles = (el("th", cell, scope="col", class_=_side(n, words)) for n, cell in enumerate(head))
    body = (_row(row, words) for row in rows)
    return scrollable(el("table", el("thead", el("tr", *titles)), el("tbody", *body)))


def scrollable(inside: Html, name: str = "table") -> Html:
    """Something that may be wider than the page; it takes the focus, so that keys scroll it."""
    return el("div", inside, class_="scroll", tabindex=0, role="group", aria_label=name)


def format_cell(cell: Cell, digits: int = 3) -> str:
    """A mean with its deviation, or a dash where there is none."""
    if cell is None:
        return "\u2013"
    if cell.std is None:
        return f"{cell.mean:.{digits}f}"
    return f"{cell.mean:.{digits}f} \u00b1 {cell.std:.{digits}f}"


def _row(cells: Sequence[Content], words: int) -> Html:
    first, *others = cells
    rest = (el("td", cell, class_=_side(n, words)) for n, cell in enumerate(others, 1))
    return el("tr", el("th", first, scope="row"), *rest)


def _side(column: int, words: int) -> str | None:
    return "words" if 0 < column < words else None


def _lines(what: LineFigure) -> list[Html]:
    entries = (el("li", legend_mark(line), line.name) for line in what.series)
    return [el("ul", *entries, class_="legend"), line_chart(what)]


def _heats(what: HeatMapFigure) -> list[Html]:
    panels = (_heat(what, panel) for panel in what.panels)
    return [el("div", *panels, class_="panels"), _scale(what.value)]


def _heat(what: HeatMapFigure, panel: HeatMap) -> Html:
    """A table that is its own text alternative."""
    spread = any(cell is not None and cell.std is not None for row in panel.cells for cell in row)
    head = el(
        "thead",
        el("tr", el("th", what.y, scope="col", rowspan=2, class_="corner"),
           el("th", what.x, scope="colgroup", colspan=len(panel.columns))),
        el("tr", *(el("th", name, scope="col") for name in panel.columns)),
    )  # fmt: skip
    rows = (
        el("tr", el("th", name, scope="row"), *(_cell(cell) for cell in cells))
        for name, cells in zip(panel.rows, panel.cells, strict=True)
    )
    made = el("table", head, el("tbody", *rows), class_="heat spread" if spread else "heat")
    return el("div", el("h4", panel.name), scrollable(made, f"{what.title}: {panel.name}"))


def _cell(cell: Cell) -> Html:
    if cell is None:
        return el("td", class_="none")
    return el("td", _rounded(cell.mean), *_deviation(cell), class_=f"h{heat_level(cell.mean)}")


def _deviation(cell: Summary) -> list[Html]:
    if cell.std is None:
        return []
    return [el("small", f"\u00b1{_rounded(cell.std)}")]


def _rounded(value: float) -> str:
    """Two decimals without the zero before the point, which a share does not need."""
    text = f"{value:.2f}"
    return text.replace("0.", ".", 1) if text.startswith(("0.", "-0.")) else text


def _scale(value: str) -> Html:
    """What the colors mean, for who sees them: all values are in the cells too."""
    steps = (el("span", class_=f"h{step}") for step in range(LEVELS + 1))
    return el("p", "0 ", el("span", *steps, class_="steps"), f" 1 {value}", class_="scale")


def _data(what: LineFigure) -> Html:
    """The numbers of a chart: a row a place on the axis or, where lines have their own, a point."""
    places = [[point.x for point in line.points] for line in what.series]
    common = all(row == places[0] for row in places)
    made = _common(what) if common else _apart(what)
    return el("details", el("summary", "Numbers"), made)


def _common(what: LineFigure) -> Html:
    head = [what.x.label, *(line.name for line in what.series)]
    rows = (
        [f"{points[0].x:g}", *(format_cell(point.y) for point in points)]
        for points in zip(*(line.points for line in what.series), strict=True)
    )
    return table(head, rows)


def _apart(what: LineFigure) -> Html:
    rows = (
        [line.name, f"{point.x:.5g}", format_cell(point.y)]
        for line in what.series
        for point in line.points
    )
    return table(["", what.x.label, what.y.label], rows)
