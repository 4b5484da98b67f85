"""Worker process: executes one run of a comparison.

The parent writes one line of JSON, the request, to standard input and keeps the pipe open. When the
pipe closes, the parent has ended, and this process ends immediately: every finished round is on
disk. If `out` of the request is null, the process prints the fastest engine and its chunk instead.
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

from perdure.config import parse
from perdure.core.errors import PerdureError
from perdure.runs.directory import is_run
from perdure.runs.given_data import stored_data
from perdure.runs.run import run
from perdure.runs.trial import find_engine

STOPPED = 130


def main() -> int:
    """Execute the request in the first line of standard input; return the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the parent
    logging.basicConfig(
        stream=sys.stderr, level=logging.WARNING, format="%(levelname)s: %(message)s"
    )
    request = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, args=(sys.stdin,), daemon=True).start()
    try:
        _execute(request)
    except PerdureError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


def _execute(request: dict[str, Any]) -> None:
    torch.set_num_threads(request["threads"])
    sys.path[:0] = request["import_from"]
    config = parse(request["config"])
    with stored_data(config.data.source, request["data"]):
        if request["out"] is None:
            sys.stdout.write(f"{json.dumps(find_engine(config))}\n")
        else:
            out = Path(request["out"])
            run(config, out=out, resume=is_run(out))


def _end_with_parent(pipe: TextIO) -> None:
    pipe.read()
    os._exit(STOPPED)


if __name__ == "__main__":
    sys.exit(main())
