"""perdure serve: answer requests for predictions over HTTP."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated

import typer

from perdure.cli.console import print_error, setup_logging, stdout_console
from perdure.cli.options import TrustCode
from perdure.core.registry import require


def serve(
    run: Annotated[Path, typer.Argument(help="A run directory.", metavar="RUN")],
    host: Annotated[
        str, typer.Option(help="Address to listen on; by default only this machine can connect.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 for any free one.")] = 8000,
    max_rows: Annotated[int, typer.Option(min=1, help="Most inputs of one request.")] = 256,
    max_bytes: Annotated[int, typer.Option(min=1, help="Most bytes of one request.")] = 8_000_000,
    trust_code: TrustCode = False,
) -> None:
    """Serve predictions of the newest model of RUN over HTTP, with a web page for images.

    A task that is added to the run is taken up without a restart.
    """
    setup_logging()
    for package in ("fastapi", "uvicorn"):
        require(package, "perdure serve", "serve")
    from perdure.deploy.live_model import LiveModel
    from perdure.deploy.serve import bound_socket, make_app, run_server

    app = make_app(LiveModel(run, trust_code), max_rows, max_bytes)
    bound = bound_socket(host, port)
    if not _is_loopback(host):
        print_error("warning", f"--host {host}: all who reach this address can use the model")
    name = f"[{host}]" if ":" in host else host
    address = f"http://{name}:{bound.getsockname()[1]}"
    stdout_console().print(f"{run} at {address} (interface: {address}/docs); stop with Ctrl-C")
    run_server(app, bound)


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
