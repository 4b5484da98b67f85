"""perdure federation, server, node and submit: a federation of real machines, over Flower."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from perdure.cli.arguments import File, Quiet, Settings, build, method_dir, read
from perdure.cli.console import setup_logging, stdout_console
from perdure.cli.interrupts import Stopped
from perdure.cli.progress import watching
from perdure.cli.run import usual_folder
from perdure.core.errors import RunError, UserError, bad_value
from perdure.flower.folders import NodeFolder, ServerFolder, check_own_address
from perdure.flower.node_process import run_node
from perdure.flower.processes import Child, executable
from perdure.flower.scaffold import create_federation
from perdure.flower.server_process import running_server
from perdure.flower.server_stream import node_count
from perdure.flower.submission import create_submission, start, unfinished
from perdure.flower.trial import follow

federation = typer.Typer(no_args_is_help=True, help="Set up a federation of real machines.")
_HERE = Path()
Folder = Annotated[Path, typer.Argument(help="The folder that federation init made.")]


@federation.callback()
def _group() -> None:
    """Set up a federation of real machines."""


@federation.command()
def init(
    folder: Annotated[Path, typer.Argument(help="A new folder.", metavar="DIR")],
    nodes: Annotated[int, typer.Option(min=1, help="How many nodes take part.")] = 3,
    host: Annotated[str, typer.Option(help="Name or address of the server.")] = "localhost",
    port: Annotated[int, typer.Option(min=1, max=65535, help="The server's port.")] = 9410,
) -> None:
    """Write certificates, keys, configs and start files, and a page that says what runs where."""
    executable("flower-superlink")
    create_federation(folder, nodes, host, port)
    stdout_console().print(f"{folder}: a server and {nodes} nodes; read {folder / 'README.md'}")


def server(
    folder: Folder = _HERE,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 for all of this machine's.")
    ] = "127.0.0.1",
) -> None:
    """Serve a federation, and go on with the runs that were not finished."""
    setup_logging()
    place = ServerFolder.read(folder)
    with _until_stopped("the server"), running_server(place, check_own_address(host)) as child:
        for submission in unfinished(place):
            start(place, submission)
            stdout_console().print(f"going on with run {submission.run}")
        stdout_console().print(
            f"serving {place.nodes} nodes on {host}:{place.port}, Ctrl-C ends it"
        )
        _wait(child)


def node(
    folder: Folder = _HERE,
    data: Annotated[
        Path | None,
        typer.Option(help="This node's own data: task-1, task-2, ... (see docs/federation.md)."),
    ] = None,
) -> None:
    """Take part in a federation with this machine's data."""
    setup_logging()
    place = NodeFolder.read(folder)
    if data is not None and not data.is_dir():
        raise bad_value("--data", str(data), "a folder that exists")
    stdout_console().print(f"node {place.number} of {place.server}, Ctrl-C ends it")
    with _until_stopped("the node"):
        run_node(place, data)


def submit(
    file: File,
    settings: Settings = None,
    server: Annotated[Path, typer.Option(help="The server's folder.", metavar="DIR")] = _HERE,
    out: Annotated[
        Path | None, typer.Option(help="The run directory; usually in the server's folder.")
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the end of the run.")] = False,
    quiet: Quiet = False,
) -> None:
    """Hand a run in to a server that is running on this machine."""
    setup_logging(quiet)
    place, config = ServerFolder.read(server), read(file, settings, "flower")
    if node_count(config) > place.nodes:
        allowed = f"at most {place.nodes}, the nodes of {server}"
        raise bad_value("clients.count", node_count(config), allowed)
    folder = out or place.path / usual_folder(file, config)
    if folder.exists():
        raise UserError(f"--out {folder}: is there already, use another --out")
    with method_dir(file):
        build(config)
        submission = create_submission(place, config, folder, file.parent)
    try:
        start(place, submission)
    except RunError as error:
        shutil.rmtree(submission.path)  # or the next server would take it up
        raise RunError(
            f"{server}: the run was not taken; is perdure server running? ({error})"
        ) from None
    stdout_console().print(f"run {submission.run} was handed in: {folder}", soft_wrap=True)
    if wait:
        with watching(config, quiet) as watch:
            follow(submission, folder, [], watch)


@contextmanager
def _until_stopped(who: str) -> Iterator[None]:
    """Ctrl-C is the way to end a server or a node: said in one line."""
    try:
        yield
    except KeyboardInterrupt:
        raise Stopped(f"{who} has ended, start it again with the same command") from None


def _wait(child: Child) -> None:
    while True:
        child.check()
        time.sleep(0.5)
