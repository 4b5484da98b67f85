"""Make the README's picture of a report: the methods of the demo with three seeds.

    python tools/report_picture.py DIR

DIR holds the runs; after an interruption, the same command resumes them. Requires chromium.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from perdure.cli.demo_parts import PERMUTED
from perdure.comparison.compare import run_plan
from perdure.comparison.plan import PlannedRun
from perdure.report import page, write_page
from perdure.report.run_records import read_runs

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "report.png"
SEEDS = (0, 1, 2)
METHODS = ("fedavg", "fot", "fedprotip", "stamp", "special")
WIDTH, HEIGHT = 1180, 2190
ONLY_ACCURACY = "<style>nav, footer, main > section:not(#accuracy) { display: none; }</style>"
"""Style that hides the other sections: the page is several screens long."""


def planned() -> list[PlannedRun]:
    """Return the runs of the demo's methods with every seed, without references and papers."""
    return [
        PlannedRun(run.label, run.config.model_copy(update={"seed": seed}))
        for seed in SEEDS
        for run in PERMUTED.runs()
        if run.label in METHODS
    ]


def photograph(shown: Path, picture: Path) -> None:
    """Save a picture of a page in a browser, with 256 colors to keep the file small."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise SystemExit("chromium is not installed")
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
    """Run the missing runs, write the page, and take the picture."""
    out = Path(sys.argv[1])
    run_plan(planned(), out)
    runs = read_runs([out])
    write_page(runs, out / "report.html")
    part = out / "picture.html"
    part.write_text(page(runs).replace("</head>", f"{ONLY_ACCURACY}</head>"), encoding="utf-8")
    photograph(part, PICTURE)


if __name__ == "__main__":
    main()
