"""Drawings that a notebook shows. Imports matplotlib, which takes a second."""

from __future__ import annotations

import base64
import html
import io

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


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
