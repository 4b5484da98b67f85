"""Call Flower's command several times in one process, since loading it takes seconds.

Started as `python flwr_calls.py`, with a JSON list of argument lists as standard input; prints one
JSON list of [whether it succeeded, its output]. It imports nothing of perdure, to start fast.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator


def main() -> None:
    """Make the calls one after another, and print their outcomes."""
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
    main()
