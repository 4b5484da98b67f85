"""Several calls of Flower's own command in one process, since loading it takes seconds.

Started as `python flwr_calls.py`, with a JSON list of argument lists as standard input; prints one
JSON list of [whether it went well, what was said]. It imports nothing of perdure, to be quick.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator


def main() -> None:
    """Make the calls one after another."""
    from flwr.cli.app import app

    outcomes = []
    for arguments in json.load(sys.stdin):
        good = True
        with _recorded() as said:
            try:
                good = not app(args=arguments, standalone_mode=False)
            except SystemExit as end:
                good = not end.code
            except Exception as error:  # whatever it is, it is told to whoever asked
                print(getattr(error, "message", "") or error)
                good = False
        outcomes.append([good, "".join(said)])
    print(json.dumps(outcomes))


@contextlib.contextmanager
def _recorded() -> Iterator[list[str]]:
    """What is written to the process's own output and error channels, by whatever means."""
    said: list[str] = []
    kept = [os.dup(number) for number in (1, 2)]
    with tempfile.TemporaryFile() as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
        try:
            yield said
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, old in zip((1, 2), kept, strict=True):
                os.dup2(old, number)
                os.close(old)
            file.seek(0)
            said.append(file.read().decode(errors="replace"))


if __name__ == "__main__":
    main()
