"""One run of a comparison in a process of its own.

The parent writes one line of JSON to standard input and keeps the pipe open. When the pipe closes,
the parent has stopped or died, and this process ends at once: every finished round is on disk.
An order without an `out` is a trial: the engine that suits the run goes to standard output.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any, TextIO

import torch

from perdure.comparison.trial import find_engine
from perdure.config import parse
from perdure.core.errors import PerdureError
from perdure.execution.runner import run
from perdure.runs.search import is_run

STOPPED = 130


def main() -> int:
    """Do what the first line of standard input says; returns the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends Ctrl-C to all; the parent acts
    logging.basicConfig(
        stream=sys.stderr, level=logging.WARNING, format="%(levelname)s: %(message)s"
    )
    order = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, args=(sys.stdin,), daemon=True).start()
    try:
        _do(order)
    except PerdureError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


def _do(order: dict[str, Any]) -> None:
    torch.set_num_threads(order["threads"])
    sys.path[:0] = order["import_from"]
    config = parse(order["config"])
    if order["out"] is None:
        sys.stdout.write(f"{json.dumps(find_engine(config))}\n")
    else:
        out = Path(order["out"])
        run(config, out=out, resume=is_run(out))


def _end_with_parent(pipe: TextIO) -> None:
    pipe.read()
    os._exit(STOPPED)


if __name__ == "__main__":
    sys.exit(main())
