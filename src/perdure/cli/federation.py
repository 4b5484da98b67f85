"""perdure federation: set up, serve and use a federation of real machines, over Flower."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from perdure.cli.console import Stopped, print_json, setup_logging, stdout_console, text_table
from perdure.cli.options import ConfigPath, Json, Quiet, Settings, importing_from, read_config
from perdure.cli.run import build_and_start, default_folder, show_progress
from perdure.core.errors import RunError, UserError, bad_value
from perdure.federation.admin.folders import (
    NodeFolder,
    ServerFolder,
    check_own_address,
    create_federation,
    only_process,
)
from perdure.federation.admin.processes import Child, executable, run_node, running_server
from perdure.federation.admin.submission import (
    create_submission,
    start_submission,
    unfinished_submissions,
)
from perdure.federation.admin.trial import follow
from perdure.federation.node.run import LOG_NAME, ReleaseLog, clean_state, summarize
from perdure.federation.settings import node_count

# ---- The table of what has left a node, for perdure federation node --show


def show_released(log: ReleaseLog, as_json: bool) -> None:
    """Print what has left a node: one row per run, task and kind of request."""
    rows = summarize(log.entries())
    if as_json:
        print_json([asdict(row) for row in rows])
    elif not rows:
        stdout_console().print("nothing has left this node")
    else:
        heads = ["run", "task", "request", "replies", "repeated", "bytes", "fields", "protection"]
        cells = [
            [r.run[:8], r.task + 1, r.kind, r.replies, r.repeated, r.bytes, r.fields, r.protection]
            for r in rows
        ]
        rows_of_text = [[str(cell) for cell in row] for row in cells]
        stdout_console().print(text_table(heads, rows_of_text))


# ---- perdure federation: set up, serve and use a federation of real machines, over Flower

federation = typer.Typer(no_args_is_help=True)
_HERE = Path()
ServerPath = Annotated[
    Path, typer.Argument(help="The server's folder that init wrote.", metavar="DIR")
]
NodePath = Annotated[Path, typer.Argument(help="The node's folder that init wrote.", metavar="DIR")]


@federation.callback()
def _group() -> None:
    """Set up, serve and use a federation of real machines."""


@federation.command()
def init(
    folder: Annotated[Path, typer.Argument(help="A new folder.", metavar="DIR")],
    nodes: Annotated[int, typer.Option(min=1, help="Number of nodes.", metavar="N")] = 3,
    host: Annotated[str, typer.Option(help="Name or address of the server.")] = "localhost",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the server.")] = 9410,
) -> None:
    """Write the folders of a server and its nodes: certificates, keys, start scripts, README."""
    executable("flower-superlink")
    create_federation(folder, nodes, host, port)
    stdout_console().print(f"{folder}: a server and {nodes} nodes; read {folder / 'README.md'}")


@federation.command()
def server(
    folder: ServerPath = _HERE,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 for all of this machine's.")
    ] = "127.0.0.1",
) -> None:
    """Start the server of a federation, and resume its unfinished runs."""
    setup_logging()
    home = ServerFolder.read(folder)
    executable("flower-superlink")
    from perdure.federation.admin.keys import check_server_certificates, checked_daily

    with (
        checked_daily(lambda: check_server_certificates(home)),
        _until_stopped("the server"),
        running_server(home, check_own_address(host)) as child,
    ):
        for submission in unfinished_submissions(home):
            start_submission(home, submission)
            stdout_console().print(f"resuming run {submission.run_id}")
        stdout_console().print(
            f"serving {home.nodes} nodes on {host}:{home.port}; stop with Ctrl-C\n"
            f"{host}:{home.port} is open to messages of nodes, signed by a key of "
            f"{home.path / 'nodes'}; runs are submitted on this machine, by users that can read "
            f"{home.flower}",
            soft_wrap=True,
        )
        _wait(child)


@federation.command()
def node(
    folder: NodePath = _HERE,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Folder with this node's data: task-1, task-2, ... (see docs/federation.md).",
            metavar="DIR",
        ),
    ] = None,
    show: Annotated[
        bool, typer.Option("--show", help="Print what has left this node, and exit.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Start a node of a federation, which trains on this machine's data."""
    setup_logging(quiet=as_json)
    home = NodeFolder.read(folder)
    if show or as_json:
        show_released(ReleaseLog(home.path / LOG_NAME), as_json)
        return
    if data is not None and not data.is_dir():
        raise bad_value("--data", str(data), "a folder that exists")
    executable("flower-supernode")
    from perdure.federation.admin.keys import check_node_certificates, checked_daily

    with (
        checked_daily(lambda: check_node_certificates(home)),
        _until_stopped("the node"),
        only_process(home.path, "node"),
    ):
        stdout_console().print(f"node {home.number} of {home.server}; stop with Ctrl-C")
        run_node(home, data)


@federation.command()
def renew(
    folder: ServerPath = _HERE,
    authority: Annotated[
        Path, typer.Option(help="The folder authority/ that init wrote.", metavar="DIR")
    ] = Path("authority"),
) -> None:
    """Write a new key and certificate of the server, which end after 825 days."""
    executable("flower-superlink")
    from perdure.federation.admin.keys import renew_certificate

    renew_certificate(ServerFolder.read(folder), authority)
    stdout_console().print(f"{folder}: new server.key and server.pem; start the server again")


@federation.command()
def submit(
    path: ConfigPath,
    settings: Settings = None,
    server: Annotated[Path, typer.Option(help="The server's folder.", metavar="DIR")] = _HERE,
    out: Annotated[
        Path | None,
        typer.Option(help="The run directory. Default: in the server's folder.", metavar="DIR"),
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the run has ended.")] = False,
    quiet: Quiet = False,
) -> None:
    """Submit a run to the server that is running on this machine."""
    setup_logging(quiet)
    executable("flwr")
    home, config = ServerFolder.read(server), read_config(path, settings, "flower")
    if node_count(config) > home.nodes:
        allowed = f"at most {home.nodes}, the nodes of {server}"
        raise bad_value("clients.count", node_count(config), allowed)
    folder = out or home.path / default_folder(path, config)
    if folder.exists():
        raise UserError(f"--out {folder}: exists already, use another --out")
    with importing_from(path.parent):
        build_and_start(config)
        submission = create_submission(home, config, folder, path.parent)
    try:
        start_submission(home, submission)
    except RunError as error:
        shutil.rmtree(submission.path)  # or the next server would start it
        raise RunError(
            f"{server}: the run was not accepted; is perdure federation server running? ({error})"
        ) from None
    stdout_console().print(f"submitted run {submission.run_id}: {folder}", soft_wrap=True)
    if wait:
        with show_progress(config, quiet) as watch:
            follow(submission, folder, [], watch)


@federation.command()
def clean(
    folder: NodePath = _HERE,
    run: Annotated[
        str | None, typer.Option(help="A run. Default: all runs that have ended.", metavar="RUN")
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Also runs that have not ended; they cannot be resumed.")
    ] = False,
) -> None:
    """Delete what the clients of a node stored in its runs."""
    removed = clean_state(NodeFolder.read(folder).state, run, everything)
    for name, size in removed.items():
        stdout_console().print(f"run {name}: {size} bytes deleted")
    if not removed:
        stdout_console().print("nothing to delete of runs that have ended (--all: of all runs)")


@contextmanager
def _until_stopped(name: str) -> Iterator[None]:
    """Report Ctrl-C, the usual way to end a server or a node, in one line."""
    try:
        yield
    except KeyboardInterrupt:
        raise Stopped(f"{name} has ended; start it again with the same command") from None


def _wait(child: Child) -> None:
    while True:
        child.check()
        time.sleep(0.5)
