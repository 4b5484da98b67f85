"""The README's picture of a report: the demo's methods over three seeds, seen by a browser.

python tools/report_picture.py DIR    (DIR keeps the runs; the same command goes on after a stop)
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from perdure.cli.demo import plan
from perdure.comparison.compare import run_plan
from perdure.comparison.plan import PlannedRun
from perdure.report import page, read_runs, write_page

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "report.png"
SEEDS = (0, 1, 2)
WIDTH, HEIGHT = 1180, 2190
ONLY_ACCURACY = "<style>nav, footer, main > section:not(#accuracy) { display: none; }</style>"
"""The whole page is several screens long."""


def planned() -> list[PlannedRun]:
    """The demo's runs with every seed."""
    return [
        PlannedRun(run.label, run.config.model_copy(update={"seed": seed}))
        for seed in SEEDS
        for run in plan()
    ]


def photograph(shown: Path, picture: Path) -> None:
    """A page as a browser shows it, with few colors so that the file is small."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise SystemExit("needs chromium")
    with tempfile.TemporaryDirectory() as profile:
        command = [
            browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            f"--user-data-dir={profile}", f"--window-size={WIDTH},{HEIGHT}",
            f"--screenshot={picture}", shown.resolve().as_uri(),
        ]  # fmt: skip
        subprocess.run(command, check=True, capture_output=True, timeout=300)
    from PIL import Image

    with Image.open(picture) as image:
        image.convert("RGB").quantize(256).save(picture, optimize=True)


def main() -> None:
    """Run what is missing, write the page, take the picture."""
    out = Path(sys.argv[1])
    run_plan(planned(), out)
    runs = read_runs([out])
    write_page(runs, out / "report.html")
    part = out / "picture.html"
    part.write_text(page(runs).replace("</head>", f"{ONLY_ACCURACY}</head>"), encoding="utf-8")
    photograph(part, PICTURE)


if __name__ == "__main__":
    main()
