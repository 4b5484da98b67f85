"""perdure report: finished runs as one page, and as figures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from perdure.cli.console import setup_logging, stdout_console
from perdure.core.errors import UserError
from perdure.report import figures, read_runs, write_page


def report(
    folders: Annotated[
        list[Path],
        typer.Argument(help="Run directories, or folders of them.", metavar="DIR..."),
    ],
    html: Annotated[
        Path | None, typer.Option(help="Write the page to this file.", metavar="FILE")
    ] = None,
    images: Annotated[
        Path | None,
        typer.Option("--figures", help="Write the figures here, as PNG and SVG.", metavar="DIR"),
    ] = None,
) -> None:
    """Put finished runs side by side on one page that needs no network."""
    setup_logging()
    if html is None and images is None:
        raise UserError("report: give --html FILE, --figures DIR, or both")
    runs = read_runs(folders)
    if html is not None:
        write_page(runs, html)
        stdout_console().print(f"{len(runs.records)} runs of {len(runs.groups)} methods: {html}")
    if images is not None:
        made = figures(runs, images)
        stdout_console().print(f"{len(made)} figures as PNG and SVG: {images}")
