"""Figures and tables as HTML, each figure with its caption and a table of its numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from perdure.report.figure_data import Cell, Figure, HeatMap, HeatMapFigure, LineFigure
from perdure.report.markup import Content, Html, el
from perdure.report.palette import LEVELS, heat_level
from perdure.report.statistics import Summary
from perdure.report.svg_charts import legend_mark, line_chart


def figure_html(figure: Figure) -> Html:
    """Return a figure with its title, caption and numbers."""
    body = _heats(figure) if isinstance(figure, HeatMapFigure) else _lines(figure)
    wide = "wide" if isinstance(figure, HeatMapFigure) and len(figure.panels) > 1 else None
    heading = f"{figure.key}-heading"
    return el(
        "figure",
        el("h3", figure.title, id=heading),
        *body,
        el("figcaption", figure.caption),
        *([_data(figure)] if isinstance(figure, LineFigure) else []),
        id=f"figure-{figure.key}",
        class_=wide,
        aria_labelledby=heading,
    )


def table(head: Sequence[Content], rows: Iterable[Sequence[Content]], words: int = 1) -> Html:
    """Return a table that can be scrolled if it is wider than the page.

    Args:
        head: Titles of the columns.
        rows: Cells of each row; the first one is its heading.
        words: Number of leading columns that hold words and are aligned left. The others hold
            numbers.
    """
    titles = (el("th", cell, scope="col", class_=_side(n, words)) for n, cell in enumerate(head))
    body = (_row(row, words) for row in rows)
    return scrollable(el("table", el("thead", el("tr", *titles)), el("tbody", *body)))


def scrollable(inside: Html, name: str = "table") -> Html:
    """Wrap content that may be wider than the page in a box that the keyboard can scroll."""
    return el("div", inside, class_="scroll", tabindex=0, role="group", aria_label=name)


def format_cell(cell: Cell, digits: int = 3) -> str:
    """Return mean ± std as text, the mean alone if there is no spread, or a dash for None."""
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


def _lines(figure: LineFigure) -> list[Html]:
    entries = (el("li", legend_mark(line), line.name) for line in figure.series)
    return [el("ul", *entries, class_="legend"), line_chart(figure)]


def _heats(figure: HeatMapFigure) -> list[Html]:
    panels = (_heat(figure, panel) for panel in figure.panels)
    return [el("div", *panels, class_="panels"), _scale(figure)]


def _heat(figure: HeatMapFigure, panel: HeatMap) -> Html:
    """Return a heat map as a table, which needs no text alternative."""
    spread = any(cell is not None and cell.std is not None for row in panel.cells for cell in row)
    head = el(
        "thead",
        el("tr", el("th", figure.y, scope="col", rowspan=2, class_="corner"),
           el("th", figure.x, scope="colgroup", colspan=len(panel.columns))),
        el("tr", *(el("th", name, scope="col") for name in panel.columns)),
    )  # fmt: skip
    rows = (
        el("tr", el("th", name, scope="row"), *(_cell(cell, figure) for cell in cells))
        for name, cells in zip(panel.rows, panel.cells, strict=True)
    )
    cells_table = el("table", head, el("tbody", *rows), class_="heat spread" if spread else "heat")
    return el("div", el("h4", panel.name), scrollable(cells_table, f"{figure.title}: {panel.name}"))


def _cell(cell: Cell, figure: HeatMapFigure) -> Html:
    if cell is None:
        return el("td", class_="none")
    level = heat_level(figure.fraction(cell.mean))
    return el("td", _rounded(cell.mean), *_deviation(cell), class_=f"h{level}")


def _deviation(cell: Summary) -> list[Html]:
    if cell.std is None:
        return []
    return [el("small", f"\u00b1{_rounded(cell.std)}")]


def _rounded(value: float) -> str:
    """Return two decimals without the leading zero."""
    text = f"{value:.2f}"
    return text.replace("0.", ".", 1) if text.startswith(("0.", "-0.")) else text


def _scale(figure: HeatMapFigure) -> Html:
    """Return the legend of the colors."""
    low, high = (f"{limit:.3g}" for limit in figure.limits)
    steps = (el("span", class_=f"h{step}") for step in range(LEVELS + 1))
    bar = el("span", *steps, class_="steps")
    return el("p", f"{low} ", bar, f" {high} {figure.value}", class_="scale")


def _data(figure: LineFigure) -> Html:
    """Return the numbers of a chart: one row per x value if the lines share it."""
    positions = [[point.x for point in line.points] for line in figure.series]
    common = all(row == positions[0] for row in positions)
    numbers = _common(figure) if common else _by_point(figure)
    return el("details", el("summary", "Numbers"), numbers)


def _common(figure: LineFigure) -> Html:
    head = [figure.x.label, *(line.name for line in figure.series)]
    rows = (
        [figure.x.position_name(points[0].x), *(format_cell(point.y) for point in points)]
        for points in zip(*(line.points for line in figure.series), strict=True)
    )
    return table(head, rows)


def _by_point(figure: LineFigure) -> Html:
    rows = (
        [line.name, figure.x.position_name(point.x, 5), format_cell(point.y)]
        for line in figure.series
        for point in line.points
    )
    return table(["", figure.x.label, figure.y.label], rows)
