"""HTML of the report, built safely: text is escaped, line charts are SVG, figures have a table."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

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
    Series,
)

# ---- Build HTML safely: text is escaped unless it has the type `Html`

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
    opened = f"<{name}"
    for key, value in attributes.items():
        if value is not None and value is not False:
            opened += f" {key.rstrip('_').replace('_', '-')}"
            opened += "" if value is True else f'="{html.escape(str(value))}"'
    if name in _EMPTY:
        return Html(f"{opened}/>")
    return Html(f"{opened}>{join(inside)}</{name}>")


def join(parts: Content) -> Html:
    """Concatenate content, with plain text escaped."""
    if parts is None or isinstance(parts, str):
        parts = [parts]
    texts = []
    for part in parts:
        if isinstance(part, str):
            texts.append(part if isinstance(part, Html) else html.escape(part, quote=False))
        elif part is not None:
            texts.append(join(part))
    return Html("".join(texts))


# ---- Line charts as SVG; the style sheet of the page colors them, so they follow its theme

WIDTH, HEIGHT = 460, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 20, 10, 44
_SIZE = 4.0
_SHAPES = {
    "square": "M-3.5-3.5H3.5V3.5H-3.5Z",
    "triangle": "M0-4.6L4.4 3.4H-4.4Z",
    "diamond": "M0-5L5 0L0 5L-5 0Z",
    "cross": "M-3.6-3.6L3.6 3.6M-3.6 3.6L3.6-3.6",
    "plus": "M0-4.6V4.6M-4.6 0H4.6",
}
"""Paths of the markers that are no circles."""


def line_chart(figure: LineFigure) -> Html:
    """Return a line chart; its title and description serve readers who cannot see it."""
    across, up = x_scale(figure.x, figure.series), y_scale(figure.y, figure.series)
    title, about = f"{figure.key}-title", f"{figure.key}-about"
    ends = [
        f"{line.name}: {line.points[0].y.mean:.3f} to {line.points[-1].y.mean:.3f}"
        for line in figure.series
        if line.points
    ]
    words = f"{figure.y.label} over {figure.x.label}. First to last value: {'; '.join(ends)}."
    return el(
        "svg",
        el("title", figure.title, id=title),
        el("desc", words, id=about),
        *_axes(figure, across, up),
        *(_band(line, across, up) for line in figure.series),
        *(_line(line, across, up) for line in figure.series),
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        aria_labelledby=f"{title} {about}",
    )


def legend_mark(line: Series) -> Html:
    """Return a short piece of a line for the legend."""
    return el(
        "svg", _path(line, "M1 8H27"), _marks(line.style, ["14"], ["8"])[0], viewBox="0 0 28 16",
        width=28, height=16, aria_hidden="true",
    )  # fmt: skip


def _across(scale: Scale, values: Sequence[float]) -> list[str]:
    """Return the horizontal coordinates of values."""
    width, span = WIDTH - _LEFT - _RIGHT, scale.high - scale.low
    places = [_LEFT + (value - scale.low) / span * width for value in values]
    return [f"{place:.1f}".removesuffix(".0") for place in places]


def _down(scale: Scale, values: Sequence[float], offset: float = 0.0) -> list[str]:
    """Return the vertical coordinates of values; bands may exceed the limits of the scale."""
    height, span = HEIGHT - _TOP - _BOTTOM, scale.high - scale.low
    shares = [min(max((value - scale.low) / span, 0.0), 1.0) for value in values]
    places = [HEIGHT - _BOTTOM - share * height + offset for share in shares]
    return [f"{place:.1f}".removesuffix(".0") for place in places]


def _axes(figure: LineFigure, across: Scale, up: Scale) -> list[Html]:
    """Return the lines of the grid, and the labels of the ticks and of the axes."""
    grid = ""
    for tick, y in zip(up.ticks, _down(up, up.ticks), strict=True):
        kind = ' class="zero"' if abs(tick) < 1e-12 and up.low < 0 else ""
        grid += f'<path d="M{_LEFT} {y}H{WIDTH - _RIGHT}"{kind}/>'
    ticks = [
        f'<text x="{_LEFT - 7}" y="{y}" text-anchor="end">{html.escape(text, quote=False)}</text>'
        for text, y in zip(up.tick_labels, _down(up, up.ticks, 4), strict=True)
    ] + [
        f'<text x="{x}" y="{HEIGHT - _BOTTOM + 17}" text-anchor="middle">'
        f"{html.escape(text, quote=False)}</text>"
        for text, x in zip(across.tick_labels, _across(across, across.ticks), strict=True)
    ]
    middle, upright = (_LEFT + WIDTH - _RIGHT) / 2, (_TOP + HEIGHT - _BOTTOM) / 2
    x_name = el("text", figure.x.label, x=middle, y=HEIGHT - 7, text_anchor="middle", class_="name")
    y_name = el(
        "text", figure.y.label, transform=f"translate(13 {upright}) rotate(-90)",
        text_anchor="middle", class_="name",
    )  # fmt: skip
    labels = [Html("".join(ticks)), x_name, y_name]
    return [
        el("g", Html(grid), class_="grid", aria_hidden="true"),
        el("g", *labels, class_="axis", aria_hidden="true"),
    ]


def _band(line: Series, across: Scale, up: Scale) -> Html | None:
    spread = [(p.x, p.y.mean, p.y.std) for p in line.points if p.y.std is not None]
    if not spread:
        return None
    around = [*spread, *((x, mean, -std) for x, mean, std in reversed(spread))]
    places = zip(
        _across(across, [x for x, _, _ in around]),
        _down(up, [mean + off for _, mean, off in around]),
        strict=True,
    )
    path = f"M{'L'.join(map(' '.join, places))}Z"
    return el("path", d=path, class_=f"band s{line.style % len(LIGHT)}")


def _line(line: Series, across: Scale, up: Scale) -> Html:
    x = _across(across, [point.x for point in line.points])
    y = _down(up, [point.y.mean for point in line.points])
    path = "M" + "L".join(map(" ".join, zip(x, y, strict=True)))
    every, name = line.mark_every, html.escape(line.name, quote=False)
    titles = [
        f"{name}: {point.y.mean:.3f}"
        + ("" if point.y.std is None else f" \u00b1 {point.y.std:.3f}")
        for point in line.points[::every]
    ]
    marks = [
        f"<g><title>{title}</title>{mark}</g>"
        for title, mark in zip(titles, _marks(line.style, x[::every], y[::every]), strict=True)
    ]
    return el("g", _path(line, path), Html("".join(marks)))


def _path(line: Series, path: str) -> Html:
    color = f"line s{line.style % len(LIGHT)}"
    return el(
        "path", d=path, class_=color, stroke_dasharray=dash_pattern(line.style, line.dashed) or None
    )


def _marks(style: int, x: Sequence[str], y: Sequence[str]) -> list[Html]:
    """Return the markers of a style at some places."""
    name = MARKERS[style % len(MARKERS)]
    kind = "open" if name in ("cross", "plus", "ring") else "mark"
    classes, places = f"{kind} s{style % len(LIGHT)}", zip(x, y, strict=True)
    if name in _SHAPES:
        begin = f'<path d="{_SHAPES[name]}" class="{classes}" transform="translate('
        return [Html(f'{begin}{across} {down})"/>') for across, down in places]
    end = f'r="{_SIZE}" class="{classes}"/>'
    return [Html(f'<circle cx="{across}" cy="{down}" {end}') for across, down in places]


# ---- Figures and tables as HTML, each figure with its caption and a table of its numbers


def figure_html(figure: Figure) -> Html:
    """Return a figure with its title, caption and numbers."""
    wide, numbers, heading = None, None, f"{figure.key}-heading"
    if isinstance(figure, HeatMapFigure):
        wide = "wide" if len(figure.panels) > 1 else None
        low, high = (f"{limit:.3g}" for limit in figure.limits)
        steps = "".join(f'<span class="h{step}"></span>' for step in range(LEVELS + 1))
        bar = el("span", Html(steps), class_="steps")  # the legend of the colors
        body = [
            el("div", *(_heat(figure, panel) for panel in figure.panels), class_="panels"),
            el("p", f"{low} ", bar, f" {high} {figure.value}", class_="scale"),
        ]
    else:
        entries = [el("li", legend_mark(line), line.name) for line in figure.series]
        body = [el("ul", *entries, class_="legend"), line_chart(figure)]
        numbers = _data(figure)
    return el(
        "figure",
        el("h3", figure.title, id=heading),
        *body,
        el("figcaption", figure.caption),
        numbers,
        id=f"figure-{figure.key}",
        class_=wide,
        aria_labelledby=heading,
    )


def table(head: Sequence[Content], rows: Iterable[Sequence[Content]], words: int = 1) -> Html:
    """Return a table that can be scrolled if it is wider than the page; `words` columns are text"""
    sides = [' class="words"' if 0 < column < words else "" for column in range(len(head))]
    titles = "".join(
        f'<th scope="col"{side}>{join(cell)}</th>' for side, cell in zip(sides, head, strict=True)
    )
    body = ""
    for first, *others in rows:
        cells = [
            f"<td{side}>{join(cell)}</td>" for side, cell in zip(sides[1:], others, strict=True)
        ]
        body += f'<tr><th scope="row">{join(first)}</th>{"".join(cells)}</tr>'
    head_row = f"<thead><tr>{titles}</tr></thead>"
    return scrollable(Html(f"<table>{head_row}<tbody>{body}</tbody></table>"))


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


def _heat(figure: HeatMapFigure, panel: HeatMap) -> Html:
    """Return a heat map as a table, which needs no text alternative."""
    spread = any(cell is not None and cell.std is not None for row in panel.cells for cell in row)
    head = el(
        "thead",
        el("tr", el("th", figure.y, scope="col", rowspan=2, class_="corner"),
           el("th", figure.x, scope="colgroup", colspan=len(panel.columns))),
        el("tr", *(el("th", name, scope="col") for name in panel.columns)),
    )  # fmt: skip
    low, high = figure.limits
    rows = ""
    for name, cells in zip(panel.rows, panel.cells, strict=True):
        rows += f"<tr>{el('th', name, scope='row')}"
        for cell in cells:
            if cell is None:
                rows += '<td class="none"></td>'
                continue
            numbers = [f"{value:.2f}" for value in (cell.mean, cell.std) if value is not None]
            mean, *deviation = [  # without the leading zero
                text.replace("0.", ".", 1) if text.startswith(("0.", "-0.")) else text
                for text in numbers
            ]
            below = f"<small>\u00b1{deviation[0]}</small>" if deviation else ""
            level = heat_level((cell.mean - low) / (high - low))
            rows += f'<td class="h{level}">{mean}{below}</td>'
        rows += "</tr>"
    body = el("tbody", Html(rows))
    cells_table = el("table", head, body, class_="heat spread" if spread else "heat")
    return el("div", el("h4", panel.name), scrollable(cells_table, f"{figure.title}: {panel.name}"))


def _data(figure: LineFigure) -> Html:
    """Return the numbers of a chart: one row per x value if the lines share it."""
    positions = [[point.x for point in line.points] for line in figure.series]
    rows: list[list[str]] = []
    if all(row == positions[0] for row in positions):
        head = [figure.x.label, *(line.name for line in figure.series)]
        for points in zip(*(line.points for line in figure.series), strict=True):
            position = figure.x.position_name(points[0].x)
            rows.append([position, *(format_cell(point.y) for point in points)])
    else:
        head = ["", figure.x.label, figure.y.label]
        for line in figure.series:
            for point in line.points:
                position = figure.x.position_name(point.x, 5)
                rows.append([line.name, position, format_cell(point.y)])
    return el("details", el("summary", "Numbers"), table(head, rows))
