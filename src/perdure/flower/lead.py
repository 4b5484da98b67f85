"""The server's part of a run that was handed in."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from perdure.core.errors import RunError, UserError
from perdure.execution.runner import run
from perdure.flower.engine import FlowerEngine, Transport
from perdure.flower.server_stream import node_count, reply_timeout
from perdure.flower.submission import read_run

log = logging.getLogger(__name__)


def run_submission(values: dict[str, Any], link: Callable[[float], Transport]) -> None:
    """Run the loop from the last checkpoint, or from the beginning, and leave word of the outcome.

    A run that failed is taken up again when the server is started the next time; one that was
    refused is not.
    """
    submission, config, out = read_run(values)
    write_log(submission.log)
    engine = FlowerEngine(
        node_count(config), link(reply_timeout(config)), config.federation is not None
    )
    try:
        run(config, out=out, resume=(out / "config.yaml").is_file(), engine=engine)
    except UserError as error:
        submission.ended("refused", str(error))
        raise
    except RunError as error:
        submission.ended("stopped", str(error))
        raise
    submission.ended("done")


def write_log(path: Path) -> None:
    """Let all messages of the library go to a file, too."""
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logging.getLogger("perdure").addHandler(handler)
    log.info("the server's part begins")
