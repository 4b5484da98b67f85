"""Run a command, and end it with all its children when the parent of this process ends.

Started as `python watchdog.py COMMAND...` with a pipe as standard input, which the parent keeps
open: when the pipe closes, the parent has stopped or died. Imports only the standard library, to
stay small.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading

_TERMINATE_SECONDS = 10.0
"""Time for a command to end after it was asked to."""


def main(command: list[str]) -> int:
    """Run the command until it ends or the parent does, and return its exit code."""
    posix = os.name == "posix"
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=posix)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # a terminal sends Ctrl-C to all processes; the parent handles it
    threading.Thread(target=_wait_for_end_of_input, args=(stop,), daemon=True).start()
    while child.poll() is None and not stop.wait(0.2):
        pass
    return _end(child, posix)


def _wait_for_end_of_input(stop: threading.Event) -> None:
    while os.read(0, 1024):  # not sys.stdin, whose lock would be held at exit
        pass
    stop.set()


def _end(child: subprocess.Popen[bytes], posix: bool) -> int:
    if child.poll() is None:
        child.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(_TERMINATE_SECONDS)
    with contextlib.suppress(OSError):
        if posix:
            os.killpg(child.pid, signal.SIGKILL)  # its remaining children
        else:
            child.kill()
    return child.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
