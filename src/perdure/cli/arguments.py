"""What the commands that take a config have in common."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from perdure.config import Config, load
from perdure.training.experiment import Experiment, build_experiment

File = Annotated[Path, typer.Argument(help="A config (YAML).", metavar="FILE")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", help="Change a key of the config.", metavar="KEY=VALUE"),
]
Engine = Annotated[
    str | None, typer.Option("--engine", help="auto, serial, vector or flower.", metavar="KIND")
]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="Show no progress, only what comes out.")
]


def read(file: Path, settings: list[str] | None, engine: str | None) -> Config:
    """The config of a file with the changes that the command line makes."""
    chosen = [f"engine.kind={engine}"] if engine is not None else []
    return load(file, [*(settings or []), *chosen])


@contextmanager
def method_dir(file: Path) -> Iterator[None]:
    """Let a method of the user's own be imported from the config's folder, as a script would."""
    folder = str(file.resolve().parent)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


def build(config: Config) -> Experiment:
    """Everything that a config names, with its first state tried out; nothing is written."""
    experiment = build_experiment(config)
    experiment.initial_state()
    return experiment
