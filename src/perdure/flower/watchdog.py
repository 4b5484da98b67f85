"""Runs one command and ends it, with all of its children, when whoever started us is gone.

Started as `python guard.py COMMAND...` with a pipe as standard input, which the parent keeps open:
when the pipe closes, the parent has stopped or died. Only the standard library, to be small.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading

_PATIENCE = 10.0
"""Seconds that a command has to end by itself when asked."""


def main(command: list[str]) -> int:
    """Run the command to its end, or to ours."""
    posix = os.name == "posix"
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=posix)
    asked = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: asked.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends Ctrl-C to all; the parent acts
    threading.Thread(target=_wait_for_end_of_input, args=(asked,), daemon=True).start()
    while child.poll() is None and not asked.wait(0.2):
        pass
    return _end(child, posix)


def _wait_for_end_of_input(asked: threading.Event) -> None:
    while os.read(0, 1024):  # not sys.stdin, whose lock would be held when we end
        pass
    asked.set()


def _end(child: subprocess.Popen[bytes], posix: bool) -> int:
    if child.poll() is None:
        child.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(_PATIENCE)
    with contextlib.suppress(OSError):
        if posix:
            os.killpg(child.pid, signal.SIGKILL)  # its children, if it left any
        else:
            child.kill()
    return child.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
