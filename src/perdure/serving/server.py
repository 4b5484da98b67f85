"""The server process: an application on a socket."""

from __future__ import annotations

import socket

import uvicorn
from fastapi import FastAPI

from perdure.core.errors import UserError


def bound_socket(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to an address; UserError if it cannot be."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
        bound.listen(2048)  # who connects before the server has started waits
    except OSError as error:
        bound.close()
        raise UserError(f"--host {host} --port {port}: cannot be used ({error.strerror})") from None
    return bound


def run_server(app: FastAPI, bound: socket.socket) -> None:
    """Answer requests until the process is asked to stop."""
    config = uvicorn.Config(app, log_level="warning", timeout_keep_alive=30, limit_concurrency=1000)
    uvicorn.Server(config).run(sockets=[bound])
