"""perdure run: train the experiment of a config."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from perdure.cli.arguments import (
    ConfigPath,
    EngineKind,
    Json,
    Quiet,
    Settings,
    build_and_start,
    importing_from,
    read_config,
    repeat_option,
)
from perdure.cli.console import print_json, setup_logging, stdout_console
from perdure.cli.interrupts import resumable
from perdure.cli.progress import show_progress
from perdure.cli.tables import result_line
from perdure.config import Config
from perdure.execution.runner import run as run_config


def run(
    path: ConfigPath,
    settings: Settings = None,
    out: Annotated[
        Path | None,
        typer.Option(help="The run directory. Default: runs/CONFIG-METHOD-seedN.", metavar="DIR"),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume a stopped run.")] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Delete the run in the run directory first.")
    ] = False,
    engine: EngineKind = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Train the experiment of a config, and write a run directory."""
    quiet = quiet or as_json
    setup_logging(quiet)
    config = read_config(path, settings, engine)
    folder = out or default_folder(path, config)
    with (
        importing_from(path.parent),
        resumable(folder, _command(path, settings, folder, engine, quiet)),
    ):
        if config.model.weights_file:
            build_and_start(config)  # refuses unsuitable weights before anything is written
        with show_progress(config, quiet) as watch:
            result = run_config(config, out=folder, resume=resume, watch=watch, overwrite=overwrite)
    if as_json:
        print_json({"path": str(folder), **result.values})
    else:
        stdout_console().print(result_line(config, result), soft_wrap=True)


def default_folder(path: Path, config: Config) -> Path:
    """Return the run directory that is used if the command line names none."""
    method = re.sub(r"[^\w.-]+", "-", config.method["kind"])
    return Path("runs") / f"{path.stem}-{method}-seed{config.seed}"


def _command(
    path: Path, settings: list[str] | None, out: Path, engine: str | None, quiet: bool
) -> list[str]:
    """Return the command that resumes a run."""
    changes = repeat_option("--set", settings)
    chosen = ["--engine", engine] if engine is not None else []
    silent = ["--quiet"] if quiet else []
    return ["perdure", "run", str(path), *changes, "--out", str(out), *chosen, *silent, "--resume"]
