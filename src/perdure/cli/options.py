"""Arguments and options that several commands share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from perdure.config import Config, load
from perdure.recipes import find_config

ConfigPath = Annotated[
    Path, typer.Argument(help="A YAML file, or the name of a recipe.", metavar="CONFIG")
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", help="Change a key of the config; repeatable.", metavar="KEY=VALUE"),
]
EngineKind = Annotated[
    str | None, typer.Option("--engine", help="auto, serial, vector or flower.", metavar="KIND")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
TrustCode = Annotated[
    bool,
    typer.Option("--trust-code", help="Execute the code of custom methods and models in RUN."),
]


def read_config(path: Path, settings: list[str] | None, engine: str | None) -> Config:
    """Return the config of a file or recipe, with the changes of the command line."""
    chosen = [f"engine.kind={engine}"] if engine is not None else []
    return load(find_config(path), [*(settings or []), *chosen])


@contextmanager
def importing_from(folder: Path) -> Iterator[None]:
    """Allow importing a custom method from the folder of a config, as a script there could."""
    entry = str(folder.resolve())
    sys.path.insert(0, entry)
    try:
        yield
    finally:
        sys.path.remove(entry)


def repeat_option(option: str, values: list[str] | None) -> list[str]:
    """Return the words of an option that was given once per value."""
    return [word for value in values or [] for word in (option, value)]
