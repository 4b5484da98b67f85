"""perdure run: train what a config describes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from perdure.cli.arguments import Engine, File, Quiet, Settings, build, method_dir, read
from perdure.cli.console import setup_logging, stdout_console
from perdure.cli.interrupts import resumable
from perdure.cli.progress import watching
from perdure.cli.tables import last_line
from perdure.config import Config
from perdure.execution.runner import run as run_config


def run(
    file: File,
    settings: Settings = None,
    out: Annotated[
        Path | None,
        typer.Option(help="The run directory; usually runs/FILE-METHOD-seedN.", metavar="DIR"),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a stopped run.")] = False,
    engine: Engine = None,
    quiet: Quiet = False,
) -> None:
    """Train what a config describes, into a run directory."""
    setup_logging(quiet)
    config = read(file, settings, engine)
    folder = out or usual_folder(file, config)
    command = _again(file, settings, folder, engine, quiet)
    with method_dir(file), resumable(folder, command):
        if config.model.weights_file:
            build(config)  # a file of weights that does not fit is found before anything is written
        with watching(config, quiet) as watch:
            result = run_config(config, out=folder, resume=resume, watch=watch)
    stdout_console().print(last_line(config, result), soft_wrap=True)


def usual_folder(file: Path, config: Config) -> Path:
    """The run directory where none is given."""
    method = re.sub(r"[^\w.-]+", "-", config.method["kind"])
    return Path("runs") / f"{file.stem}-{method}-seed{config.seed}"


def _again(
    file: Path, settings: list[str] | None, out: Path, engine: str | None, quiet: bool
) -> list[str]:
    """The command that goes on with a run."""
    changes = [part for text in settings or [] for part in ("--set", text)]
    chosen = ["--engine", engine] if engine is not None else []
    silent = ["--quiet"] if quiet else []
    return ["perdure", "run", str(file), *changes, "--out", str(out), *chosen, *silent, "--resume"]
