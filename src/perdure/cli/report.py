"""perdure report: finished runs as a page, as figures or as a table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from perdure.cli.compare import comparison_tables, print_notes
from perdure.cli.console import print_json, setup_logging, stdout_console
from perdure.cli.options import Json
from perdure.report import Runs, figures, write_page
from perdure.report.comparison import Comparison, compare_groups
from perdure.report.records import reading_records
from perdure.runs.records import read_runs


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
    as_json: Json = False,
) -> None:
    """Compare finished runs on one HTML page that needs no network, or print their table."""
    setup_logging(quiet=as_json)
    runs = read_runs(folders)
    with reading_records(runs):
        if html is not None:
            write_page(runs, html)
        names = list(figures(runs, images)) if images is not None else []
        comparison = compare_groups(runs.groups, notes=runs.notes)
    if as_json:
        print_json(_document(runs, comparison, html, images))
        return
    console = stdout_console()
    if html is None and images is None:
        for table in comparison_tables(comparison):
            console.print(table)
        print_notes(console, comparison)
    if html is not None:
        console.print(f"{len(runs.records)} runs of {len(runs.groups)} methods: {html}")
    if images is not None:
        console.print(f"{len(names)} figures as PNG and SVG: {images}")


def _document(
    runs: Runs, comparison: Comparison, html: Path | None, images: Path | None
) -> dict[str, Any]:
    return {
        "runs": {
            name: [str(record.path) for record in group] for name, group in runs.groups.items()
        },
        "table": comparison.to_dict(),
        "html": str(html) if html is not None else None,
        "figures": str(images) if images is not None else None,
    }
