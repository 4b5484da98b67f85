"""perdure data: the data sets that a config can name, and their files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from perdure.cli.console import print_json, stdout_console, text_table
from perdure.cli.options import Json
from perdure.data.named.files import cache_folder, data_folder
from perdure.data.named.load import find_set, make_set
from perdure.data.named.sets import DATA_SETS, DataSet

data = typer.Typer(no_args_is_help=True, help="Data sets that a config can name.")


@data.callback()
def _data() -> None:
    """List the data sets that a config can name, or make the file of one."""


@data.command("list")
def list_sets(as_json: Json = False) -> None:
    """List the data sets: what they hold, their license, where they are found and come from.

    They are looked for in the folder of PERDURE_DATA, then in the cache, which PERDURE_CACHE
    moves. What is in neither is downloaded when a run needs it.
    """
    rows = [_row(name, data_set) for name, data_set in DATA_SETS.items()]
    if as_json:
        print_json(rows)
        return
    columns = ["name", "contents", "license", "found", "origin"]
    cells = [
        [*(row[key] for key in columns[:3]), row["found"] or "-", row["origin"]] for row in rows
    ]
    stdout_console().print(text_table(columns, cells))
    folder = data_folder()
    stdout_console().print(f"PERDURE_DATA: {folder or 'not set'}; cache: {cache_folder()}")


def _row(name: str, data_set: DataSet) -> dict[str, Any]:
    found = find_set(name)
    return {
        "name": name,
        "title": data_set.title,
        "contents": data_set.contents,
        "license": data_set.license,
        "found": None if found is None else str(found),
        "origin": "; ".join(_origins(data_set)),
        "files": data_set.official.files,
        "url": data_set.official.url,
    }


def _origins(data_set: DataSet) -> list[str]:
    hub, vision = data_set.hub, data_set.torchvision
    origins = [] if hub is None else [f"huggingface {hub.path}"]
    origins += [] if vision is None else [f"torchvision {vision.name}"]
    return [*origins, data_set.official.url]


@data.command()
def make(
    name: Annotated[str, typer.Argument(help="Name of the data set.", metavar="NAME")],
    folder: Annotated[Path, typer.Option("--from", help="Folder with its official files.")],
    out: Annotated[
        Path | None, typer.Option(help="File to write. Default: one in the cache.")
    ] = None,
    size: Annotated[
        int | None, typer.Option(min=1, help="Pixels to which images in folders are resized.")
    ] = None,
    test_fraction: Annotated[
        float, typer.Option(help="Fraction held out for testing, of folders without test/.")
    ] = 0.2,
) -> None:
    """Write the file of a data set (npz, or JSON lines for texts) from its official files.

    These are named by `perdure data list --json`. Files of pickled Python objects, as in the Python
    version of CIFAR, are read without running any code that they name.
    """
    path = make_set(name, folder, out, size, test_fraction)
    stdout_console().print(f"{name}: written to {path}", soft_wrap=True)
