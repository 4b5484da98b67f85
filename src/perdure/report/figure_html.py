"""HTML of the report, built safely: text is escaped, line charts are SVG, figures have a table."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Sequence

from perdure.report.axes import (
    LEVELS,
    LIGHT,
    MARKERS,
    Scale,
    dash_pattern,
    heat_level,
    x_scale,
    y_scale,
)
from perdure.report.figure_data import (
    Cell,
    Figure,
    HeatMap,
    HeatMapFigure,
    LineFigure,
    Point,
    Series,
    Summary,
)

# ------------------------------------------------------------------------------------------------
# Build HTML safely: text is escaped unless it has the type `Html`.
# ------------------------------------------------------------------------------------------------

_EMPTY = frozenset({"meta", "link", "br", "path", "line", "rect", "circle", "use", "col"})


class Html(str):
    """A string that is HTML already and must not be escaped."""

    __slots__ = ()


Content = str | Iterable["Content"] | None
"""Text (escaped unless it is `Html`), or nested sequences of it; None is empty."""


def el(name: str, /, *inside: Content, **attributes: str | int | float | bool | None) -> Html:
    """Return an HTML or SVG element.

    Example:
        >>> el("p", "a < b", class_="note")
        '<p class="note">a &lt; b</p>'
    """
    opened = f"<{name}{''.join(map(_attribute, attributes.items()))}"
    if name in _EMPTY:
        return Html(f"{opened}/>")
    return Html(f"{opened}>{join(inside)}</{name}>")


def join(parts: Content) -> Html:
    """Concatenate content, with plain text escaped."""
    if parts is None:
        return Html("")
    if isinstance(parts, Html):
        return parts
    if isinstance(parts, str):
        return Html(html.escape(parts, quote=False))
    return Html("".join(join(part) for part in parts))


def _attribute(item: tuple[str, str | int | float | bool | None]) -> str:
    key, value = item
    if value is None or value is False:
        return ""
    name = key.rstrip("_").replace("_", "-")
    if value is True:
        return f" {name}"
    return f' {name}="{html.escape(str(value))}"'


# ------------------------------------------------------------------------------------------------
# Line charts as SVG; the style sheet of the page colors them, so they follow its theme.
# ------------------------------------------------------------------------------------------------

WIDTH, HEIGHT = 460, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 20, 10, 44
_SIZE = 4.0


def line_chart(figure: LineFigure) -> Html:
    """Return a line chart; its title and description serve readers who cannot see it."""
    across, up = x_scale(figure.x, figure.series), y_scale(figure.y, figure.series)
    canvas = _Canvas(across, up)
    title, about = f"{figure.key}-title", f"{figure.key}-about"
    return el(
        "svg",
        el("title", figure.title, id=title),
        el("desc", chart_description(figure), id=about),
        el("g", *canvas.grid(), class_="grid", aria_hidden="true"),
        el("g", *canvas.labels(figure), class_="axis", aria_hidden="true"),
        *(canvas.band(line) for line in figure.series),
        *(canvas.line(line) for line in figure.series),
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        aria_labelledby=f"{title} {about}",
    )


def chart_description(figure: LineFigure) -> str:
    """Return the first and the last value of each line in words."""
    lines = (
        f"{line.name}: {line.points[0].y.mean:.3f} to {line.points[-1].y.mean:.3f}"
        for line in figure.series
        if line.points
    )
    return f"{figure.y.label} over {figure.x.label}. First to last value: {'; '.join(lines)}."


def legend_mark(line: Series) -> Html:
    """Return a short piece of a line for the legend."""
    return el(
        "svg", _path(line, "M1 8H27"), _mark(line.style, 14, 8), viewBox="0 0 28 16", width=28,
        height=16, aria_hidden="true",
    )  # fmt: skip


def _path(line: Series, path: str) -> Html:
    color = f"line s{line.style % len(LIGHT)}"
    return el(
        "path", d=path, class_=color, stroke_dasharray=dash_pattern(line.style, line.dashed) or None
    )


class _Canvas:
    """Maps values to coordinates of the drawing, and draws."""

    def __init__(self, across: Scale, up: Scale) -> None:
        self.across, self.up = across, up

    def x(self, value: float) -> float:
        return _LEFT + self.across.fraction(value) * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        fraction = min(max(self.up.fraction(value), 0.0), 1.0)  # bands may exceed the limits
        return HEIGHT - _BOTTOM - fraction * (HEIGHT - _TOP - _BOTTOM)

    def grid(self) -> Iterator[Html]:
        for tick in self.up.ticks:
            kind = "zero" if abs(tick) < 1e-12 and self.up.low < 0 else None
            y = _short(self.y(tick))
            yield el("path", d=f"M{_LEFT} {y}H{WIDTH - _RIGHT}", class_=kind)

    def labels(self, figure: LineFigure) -> Iterator[Html]:
        for tick in self.up.ticks:
            at = _short(self.y(tick) + 4)
            yield el("text", self.up.tick_label(tick), x=_LEFT - 7, y=at, text_anchor="end")
        for tick in self.across.ticks:
            at, below = _short(self.x(tick)), HEIGHT - _BOTTOM + 17
            yield el("text", self.across.tick_label(tick), x=at, y=below, text_anchor="middle")
        middle = (_LEFT + WIDTH - _RIGHT) / 2
        yield el(
            "text", figure.x.label, x=middle, y=HEIGHT - 7, text_anchor="middle", class_="name"
        )
        upright = (_TOP + HEIGHT - _BOTTOM) / 2
        yield el(
            "text", figure.y.label, transform=f"translate(13 {upright}) rotate(-90)",
            text_anchor="middle", class_="name",
        )  # fmt: skip

    def band(self, line: Series) -> Html:
        spread = [(p, p.y.std) for p in line.points if p.y.std is not None]
        if not spread:
            return Html("")
        above = [self._at(p, +deviation) for p, deviation in spread]
        below = [self._at(p, -deviation) for p, deviation in reversed(spread)]
        path = f"M{'L'.join(above + below)}Z"
        return el("path", d=path, class_=f"band s{line.style % len(LIGHT)}")

    def line(self, line: Series) -> Html:
        path = "M" + "L".join(self._at(point) for point in line.points)
        marks = (self._marked(line, point) for point in line.points[:: line.mark_every])
        return el("g", _path(line, path), *marks)

    def _marked(self, line: Series, point: Point) -> Html:
        text = f"{line.name}: {point.y.mean:.3f}"
        if point.y.std is not None:
            text += f" \u00b1 {point.y.std:.3f}"
        mark = _mark(line.style, self.x(point.x), self.y(point.y.mean))
        return el("g", el("title", text), mark)

    def _at(self, point: Point, off: float = 0.0) -> str:
        return f"{_short(self.x(point.x))} {_short(self.y(point.y.mean + off))}"


def _mark(style: int, x: float, y: float) -> Html:
    paths = {
        "square": "M-3.5-3.5H3.5V3.5H-3.5Z",
        "triangle": "M0-4.6L4.4 3.4H-4.4Z",
        "diamond": "M0-5L5 0L0 5L-5 0Z",
        "cross": "M-3.6-3.6L3.6 3.6M-3.6 3.6L3.6-3.6",
        "plus": "M0-4.6V4.6M-4.6 0H4.6",
    }
    name = MARKERS[style % len(MARKERS)]
    kind = "open" if name in ("cross", "plus", "ring") else "mark"
    classes = f"{kind} s{style % len(LIGHT)}"
    if name in paths:
        position = f"translate({_short(x)} {_short(y)})"
        return el("path", d=paths[name], class_=classes, transform=position)
    return el("circle", cx=_short(x), cy=_short(y), r=_SIZE, class_=classes)


def _short(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


# ------------------------------------------------------------------------------------------------
# Figures and tables as HTML, each figure with its caption and a table of its numbers.
# ------------------------------------------------------------------------------------------------


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
    """Return a table that can be scrolled if it is wider than the page."""
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
