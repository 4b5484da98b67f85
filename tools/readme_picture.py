"""Draw docs/demo.png, the picture of the README: charts of the demo's report on permuted digits.

    python tools/readme_picture.py [DIR]

DIR holds the runs, as `perdure demo` makes them; what is missing there is run (about four minutes).
Equal runs give equal bytes.
"""

from __future__ import annotations

import io
import sys
import tempfile
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure
from PIL import Image

from perdure.cli.demo import MODE, PERMUTED
from perdure.report import figures
from perdure.runs.compare.compare import run_plan
from perdure.runs.records import read_runs

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "demo.png"
LABELS = ("fedavg", "fot", "fedprotip", "stamp", "special")
WIDTH = 1200
MATRICES, CURVES = f"matrix-{MODE}", (f"average-{MODE}", f"first-task-{MODE}")
COLORS = 128


def charts(folder: Path) -> dict[str, Figure]:
    """Return the charts of the demo's methods without references, after making missing runs."""
    planned = [run for run in PERMUTED.runs() if run.label in LABELS]
    run_plan(planned, folder)
    return dict(figures(read_runs([run.path(folder) for run in planned])))


def pixels(chart: Figure, width: int) -> Image.Image:
    """Return a chart as an image of this width on white."""
    file = io.BytesIO()
    dpi = width / chart.get_size_inches()[0]
    with mpl.rc_context({"savefig.facecolor": "white"}):
        chart.savefig(file, format="png", dpi=dpi, metadata={"Software": None})
    image = Image.open(file).convert("RGB")
    return image.resize((width, round(image.height * width / image.width)))


def picture(drawn: dict[str, Figure]) -> Image.Image:
    """Return the curves side by side above the accuracy matrices."""
    curves = [pixels(drawn[key], WIDTH // len(CURVES)) for key in CURVES]
    matrices = pixels(drawn[MATRICES], WIDTH)
    top = max(curve.height for curve in curves)
    whole = Image.new("RGB", (WIDTH, top + matrices.height), "white")
    for index, curve in enumerate(curves):
        whole.paste(curve, (index * WIDTH // len(CURVES), 0))
    whole.paste(matrices, (0, top))
    return whole


def main(folder: Path) -> None:
    """Draw the picture with few colors, which keeps the file small."""
    drawn = picture(charts(folder))
    drawn.quantize(COLORS, dither=Image.Dither.NONE).save(PICTURE, optimize=True)
    print(f"{PICTURE}: {drawn.width} x {drawn.height}, {PICTURE.stat().st_size // 1000} kB")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(Path(temporary))
