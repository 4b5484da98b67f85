"""perdure extend: add tasks to a run. perdure rewind: go back to an earlier task of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from perdure.cli.console import print_json, resumable, setup_logging, stdout_console
from perdure.cli.options import Json, Quiet
from perdure.cli.run import result_line, show_progress
from perdure.config import Config, read_settings
from perdure.core.errors import UserError
from perdure.runs.directory import RunDirectory
from perdure.runs.extend import Labels, extended_config, kept_tasks
from perdure.runs.extend import extend as extend_run
from perdure.runs.extend import rewind as rewind_run
from perdure.runs.result import Result
from perdure.runs.run import resume as resume_run

RunPath = Annotated[Path, typer.Argument(help="The run directory.", metavar="RUN")]
TrustCode = Annotated[
    bool, typer.Option("--trust-code", help="Execute custom code that the run contains.")
]


def extend(
    path: RunPath,
    tasks: Annotated[
        int | None, typer.Option(help="Add so many tasks of the run's stream.", metavar="N", min=1)
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Add new data: a folder, an .npz, .csv, .parquet or .jsonl file, or a YAML file "
            "with a section like data, or a list of them.",
            metavar="SPEC",
        ),
    ] = None,
    new_classes: Annotated[
        bool, typer.Option("--new-classes", help="All classes of the new data are new.")
    ] = False,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="A setting of the new tasks; repeatable.", metavar="KEY=VALUE"),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue an extension that was stopped.")
    ] = False,
    trust_code: TrustCode = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Add tasks to a run, and train them."""
    setup_logging(quiet or as_json)
    if resume and (tasks, data, settings or None) != (None, None, None):
        raise UserError("--resume: must be given alone, since the run knows what was added")
    config = RunDirectory.open(path).config()
    labels: Labels = "separate" if new_classes else "shared"
    added = (tasks, data, labels, read_settings(settings or []))
    longer = config if resume else extended_config(config, *added)
    with (
        resumable(path, _command(path, trust_code)),
        show_progress(longer, quiet or as_json) as watch,
    ):
        if resume:
            result = resume_run(path, watch=watch, trust=trust_code)
        else:
            result = extend_run(path, *added, watch, trust_code)
    _show(path, longer, result, as_json)


def _command(path: Path, trust_code: bool) -> list[str]:
    """Return the command that continues an extension."""
    return ["perdure", "extend", str(path), "--resume", *(["--trust-code"] if trust_code else [])]


def rewind(
    path: RunPath,
    task: Annotated[
        int | None, typer.Option(help="The last task that stays, from 1.", metavar="K", min=1)
    ] = None,
    trust_code: TrustCode = False,
    as_json: Json = False,
) -> None:
    """Go back to the end of an earlier task of a run; without --task, list them."""
    setup_logging(as_json)
    if task is None:
        _list(path, as_json)
    else:
        result = rewind_run(path, task, trust_code)
        _show(path, RunDirectory.open(path).config(), result, as_json)


def _show(path: Path, config: Config, result: Result, as_json: bool) -> None:
    if as_json:
        print_json({"path": str(path), **result.values})
    else:
        stdout_console().print(result_line(config, result), soft_wrap=True)


def _list(path: Path, as_json: bool) -> None:
    kept = kept_tasks(path)
    if as_json:
        print_json({"tasks": [{"task": task, "bytes": size} for task, size in kept.items()]})
        return
    for task, size in kept.items():
        stdout_console().print(f"task {task}: checkpoint of {size:,} bytes")
    if not kept:
        stdout_console().print("no checkpoint of a task is kept (runs.keep_tasks)")
