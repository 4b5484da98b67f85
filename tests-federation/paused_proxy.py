"""A TCP proxy on loopback that can be cut, as a network is."""

from __future__ import annotations

import contextlib
import socket
import threading


class PausedProxy:
    """Forwards connections to a port of this machine, until it is cut.

    While it is cut, bytes and new connections wait, as behind a router that is gone. When it is
    repaired, earlier connections are broken, as those that a router has forgotten.
    """

    def __init__(self, target: int) -> None:
        self._target, self._open = target, threading.Event()
        self._sockets: list[socket.socket] = []
        self._open.set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.connections = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Let nothing pass any more."""
        self._open.clear()

    def repair(self) -> None:
        """Break earlier connections, and let new ones pass."""
        broken, self._sockets = self._sockets, []
        for each in broken:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self._open.set()

    def close(self) -> None:
        self._listener.close()
        self.repair()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                threading.Thread(target=self._connect, args=(near,), daemon=True).start()

    def _connect(self, near: socket.socket) -> None:
        self._open.wait()
        with contextlib.suppress(OSError):
            far = socket.create_connection(("127.0.0.1", self._target))
            self._sockets += [near, far]
            self.connections += 1
            for pair in ((near, far), (far, near)):
                threading.Thread(target=self._forward, args=pair, daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self._open.wait()
                target.sendall(data)
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
