"""What runs between this process and Flower's, in separate processes.

It imports nothing of perdure, and only what is needed, to start fast and to stay small.

    python child_scripts.py watch COMMAND...    runs a command, and ends it with all its children
                                                when the parent of this process ends: standard
                                                input is a pipe that the parent keeps open
    python child_scripts.py call                calls Flower's command several times, since loading
                                                it takes seconds: a JSON list of argument lists is
                                                the standard input; prints one JSON list of
                                                [whether it succeeded, its output]
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

_TERMINATE_SECONDS = 10.0
"""Time for a command to end after it was asked to."""


def watch(command: list[str]) -> int:
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


def call() -> None:
    """Make calls of Flower's command one after another, and print their outcomes."""
    import json

    from flwr.cli.app import app

    outcomes = []
    for arguments in json.load(sys.stdin):
        succeeded = True
        with _captured_output() as output:
            try:
                succeeded = not app(args=arguments, standalone_mode=False)
            except SystemExit as end:
                succeeded = not end.code
            except Exception as error:  # any error is reported to the caller
                print(getattr(error, "message", "") or error)
                succeeded = False
        outcomes.append([succeeded, "".join(output)])
    print(json.dumps(outcomes))


@contextlib.contextmanager
def _captured_output() -> Iterator[list[str]]:
    """Collect everything written to standard output and standard error."""
    import tempfile

    output: list[str] = []
    saved = [os.dup(number) for number in (1, 2)]
    with tempfile.TemporaryFile() as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
        try:
            yield output
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, old in zip((1, 2), saved, strict=True):
                os.dup2(old, number)
                os.close(old)
            file.seek(0)
            output.append(file.read().decode(errors="replace"))


if __name__ == "__main__":
    if sys.argv[1] == "watch":
        sys.exit(watch(sys.argv[2:]))
    call()
