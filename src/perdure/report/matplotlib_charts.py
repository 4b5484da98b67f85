"""Draw the figures of the report with matplotlib, and save them as image files."""

from __future__ import annotations

import base64
import html
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from perdure.core.errors import UserError, bad_value
from perdure.core.text import argument
from perdure.report.axes import (
    LEVELS,
    LIGHT,
    MARKERS,
    dash_pattern,
    heat_color,
    heat_level,
    text_color,
    x_scale,
    y_scale,
)
from perdure.report.figure_data import Cell, HeatMap, HeatMapFigure, LineFigure, Series
from perdure.report.figure_data import Figure as AnyFigure
from perdure.report.records import Runs

if TYPE_CHECKING:
    from matplotlib.axes import Axes


# ---- Drawings that a notebook shows. Imports matplotlib, which takes a second


class Drawing(Figure):
    """A matplotlib figure that pyplot does not know, and that a notebook shows nevertheless."""

    def __init__(self, width: float, height: float) -> None:
        super().__init__(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(self)

    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        self.savefig(file, format="png", dpi=110)
        return file.getvalue()


class Drawings(dict[str, Drawing]):
    """Drawings by name, which a notebook shows one below the other."""

    def __repr__(self) -> str:
        return f"{len(self)} figures: {', '.join(self)}"

    def _repr_html_(self) -> str:
        return "".join(
            f'<p>{html.escape(name)}</p><img alt="{html.escape(name)}" '
            f'src="data:image/png;base64,{base64.b64encode(drawing._repr_png_()).decode()}">'
            for name, drawing in self.items()
        )


# ---- Draw the figures of the report with matplotlib, and save them as image files

FORMATS = ("png", "svg", "pdf")
_SIGNS = {
    "circle": "o", "square": "s", "triangle": "^", "diamond": "D", "cross": "x", "plus": "+",
    "ring": "o",
}  # fmt: skip
_STYLE: Any = {
    "font.size": 9, "axes.titlesize": 10, "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "axes.grid.axis": "y", "grid.color": "#dfe3e8", "axes.axisbelow": True,
    "legend.frameon": False, "svg.hashsalt": "perdure", "svg.fonttype": "none",
}  # fmt: skip


def figures(
    runs: Runs, out: str | Path | None = None, formats: Sequence[str] = ("png", "svg")
) -> Drawings:
    """Draw every figure of the report.

    The drawings are matplotlib figures that a script can change further. They are made outside
    pyplot, and the settings of matplotlib do not change.

    Raises:
        UserError: A format is unknown, or `out` cannot be created.

    """
    from perdure.report.page import all_figures

    wrong = next((name for name in formats if name not in FORMATS), None)
    if wrong is not None:
        raise bad_value("formats", wrong, ", ".join(FORMATS))
    if out is not None:
        _make(Path(out))  # before the work of drawing
    drawn = Drawings({figure.key: draw(figure) for figure in all_figures(runs)})
    if out is not None:
        save(drawn, Path(out), formats)
    return drawn


def draw(figure: AnyFigure) -> Drawing:
    """Draw one figure."""
    import matplotlib as mpl  # imported here, since it takes a second

    with mpl.rc_context(_STYLE):
        return _heats(figure) if isinstance(figure, HeatMapFigure) else _lines(figure)


def save(drawn: dict[str, Drawing], out: Path, formats: Sequence[str]) -> None:
    """Save drawings as files named by their keys; equal drawings give equal bytes."""
    import matplotlib as mpl

    with mpl.rc_context(_STYLE):
        for key, drawing in drawn.items():
            for name in formats:
                undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(name)
                drawing.savefig(out / f"{key}.{name}", dpi=200, metadata=undated)


def _make(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        where = argument("out", out, "--figures")
        raise UserError(f"{where}: cannot be created ({error.strerror})") from None


def _lines(figure: LineFigure) -> Drawing:
    drawing = _blank(5.2, 3.6)
    axes = drawing.add_subplot()
    for line in figure.series:
        _line(axes, line)
    across, up = x_scale(figure.x, figure.series), y_scale(figure.y, figure.series)
    axes.set(title=figure.title, xlabel=figure.x.label, ylabel=figure.y.label)
    axes.set(xlim=(across.low, across.high), ylim=(up.low, up.high))
    axes.set_xticks(across.ticks, across.tick_labels)
    axes.set_yticks(up.ticks, up.tick_labels)
    axes.legend()
    return drawing


def _line(axes: Axes, line: Series) -> None:
    color = LIGHT[line.style % len(LIGHT)]
    name = MARKERS[line.style % len(MARKERS)]
    x = [point.x for point in line.points]
    y = [point.y.mean for point in line.points]
    around = [point.y.std or 0.0 for point in line.points]
    axes.plot(
        x, y, color=color, label=line.name, linewidth=1.6, markersize=5,
        marker=_SIGNS[name], markevery=line.mark_every,
        markerfacecolor="white" if name == "ring" else color,
        linestyle=_dashes(dash_pattern(line.style, line.dashed)),
    )  # fmt: skip
    low = [a - b for a, b in zip(y, around, strict=True)]
    high = [a + b for a, b in zip(y, around, strict=True)]
    if any(around):
        axes.fill_between(x, low, high, color=color, alpha=0.13, linewidth=0)


def _dashes(pattern: str) -> Any:
    return (0, tuple(float(part) for part in pattern.split())) if pattern else "-"


def _heats(figure: HeatMapFigure) -> Drawing:
    """Draw the heat maps in up to three columns, with the values in their cells."""
    across = min(3, len(figure.panels))
    down = math.ceil(len(figure.panels) / across)
    widest = max(len(panel.columns) for panel in figure.panels)
    highest = max(len(panel.rows) for panel in figure.panels)
    drawing = _blank(across * (1.3 + 0.52 * widest), 0.5 + down * (1.1 + 0.42 * highest))
    drawing.suptitle(f"{figure.title}\n{figure.value}", fontsize=9)
    for number, panel in enumerate(figure.panels, 1):
        _panel(drawing.add_subplot(down, across, number), figure, panel)
    return drawing


def _panel(axes: Axes, figure: HeatMapFigure, panel: HeatMap) -> None:
    from matplotlib.colors import ListedColormap

    colors = ListedColormap([heat_color(step) for step in range(LEVELS + 1)])
    shown = [
        [math.nan if cell is None else heat_level(figure.fraction(cell.mean)) for cell in row]
        for row in panel.cells
    ]
    axes.imshow(shown, cmap=colors, vmin=-0.5, vmax=LEVELS + 0.5, aspect="auto")
    axes.set(title=panel.name, xlabel=figure.x, ylabel=figure.y)
    axes.set_xticks(range(len(panel.columns)), panel.columns)
    axes.set_yticks(range(len(panel.rows)), panel.rows)
    axes.grid(False)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    for i, row in enumerate(panel.cells):
        for j, cell in enumerate(row):
            _write(axes, j, i, cell, figure)


def _write(axes: Axes, x: int, y: int, cell: Cell, figure: HeatMapFigure) -> None:
    if cell is None:
        return
    text = f"{cell.mean:.2f}" + ("" if cell.std is None else f"\n\u00b1{cell.std:.2f}")
    axes.text(
        x,
        y,
        text,
        ha="center",
        va="center",
        fontsize=7,
        color=text_color(heat_color(heat_level(figure.fraction(cell.mean)))),
    )


def _blank(width: float, height: float) -> Drawing:
    """Return an empty figure that pyplot does not know."""
    return Drawing(width, height)
