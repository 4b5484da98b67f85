"""Line charts as SVG; the style sheet of the page colors them, so they follow its theme."""

from __future__ import annotations

from collections.abc import Iterator

from perdure.report.axis_scale import Scale, x_scale, y_scale
from perdure.report.figure_data import LineFigure, Point, Series
from perdure.report.markup import Html, el
from perdure.report.palette import LIGHT, MARKERS, dash_pattern

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
