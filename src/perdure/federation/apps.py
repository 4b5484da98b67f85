"""Flower's two apps: the server's, which runs the loop, and the nodes', which serves requests.

Heavy imports wait until they are needed, because without `executor` every request starts a process.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from perdure.core.version import __version__
from perdure.federation.server.transport import (
    FlowerTransport,
    Transport,
    make_content,
    other_version,
    read_content,
)

if TYPE_CHECKING:
    from perdure.config import Config
    from perdure.federation.server.engine import FlowerEngine

client = ClientApp()
server = ServerApp()
log = logging.getLogger(__name__)

_PARENT_CHECK_SECONDS = 1.0
IN_USE_SECONDS = 60.0
"""Time in which the loop of a dead server notices that it must end."""


@server.main()
def lead(grid: Grid, context: Context) -> None:
    """Run a submission on the server, with the nodes behind its engine."""
    _log_to_stderr()
    _exit_with_parent()
    run_submission(context.run_config, lambda timeout: FlowerTransport(grid, timeout))


def run_submission(values: dict[str, Any], make_transport: Callable[[float], Transport]) -> None:
    """Run a submission from its last checkpoint or from the beginning, and record the outcome.

    A run that fails is resumed when the server is started the next time; one that is refused is
    not. If another process still trains it, such as the loop of a server that was just killed, it
    is waited for; if it does not end, the outcome is left to it.
    """
    from perdure.core.errors import InUse, RunError, UserError
    from perdure.federation.admin.submission import read_run
    from perdure.federation.server.engine import FlowerEngine
    from perdure.federation.settings import reply_timeout

    submission, config, out = read_run(values)
    _log_to_file(submission.log)
    transport = make_transport(reply_timeout(config))
    engine = FlowerEngine.with_transport(config, transport)
    try:
        _run_when_free(config, out, engine)
        engine.end_run()  # first: nobody tells nodes the end of a run that is recorded as done
    except InUse:
        raise
    except (UserError, RunError) as error:
        state = "refused" if isinstance(error, UserError) else "stopped"
        log.error("the run is %s: %s", state, error)
        submission.record_outcome(state, str(error))
        raise
    submission.record_outcome("done")


def _run_when_free(config: Config, out: Path, engine: FlowerEngine) -> None:
    """Train a run, or resume it, once no other process does."""
    from perdure.core.errors import InUse, UserError
    from perdure.runs.run import run

    end, file = time.monotonic() + IN_USE_SECONDS, out / "config.yaml"
    while True:
        is_begun = file.is_file()
        try:
            run(config, out=out, resume=is_begun, engine=engine)
            return
        except InUse as error:
            if time.monotonic() > end:
                raise
            log.warning("%s; waiting for its end", error)
            time.sleep(_PARENT_CHECK_SECONDS)
        except UserError:
            if is_begun or not file.is_file():  # else the loop of a dead server began it meanwhile
                raise


@client.train("work")
def work(message: Message, context: Context) -> Message:
    """Serve one request on a node, and return the reply."""
    from perdure.federation.messages import BadMessage

    _log_to_stderr()
    _exit_with_parent()
    header, body = read_content(message.content)
    try:
        check_version(message)
        reply = serve_request(header, body, context)
    except BadMessage as error:
        log.warning("refused: %s", error)
        return Message(make_content(str(error), b""), reply_to=message)
    return Message(make_content("", reply), reply_to=message)


def check_version(message: Message) -> None:
    """Refuse a server of another version, whose messages may mean something else."""
    from perdure.federation.messages import BadMessage

    if (version := other_version(message.content)) is not None:
        raise BadMessage(f"the server must run perdure {__version__} as this node, got {version}")


def serve_request(header: str, body: bytes, context: Context) -> bytes:
    """Serve one request on a node, and return the reply.

    Raises:
        BadMessage: The request is refused. The sentence is for the server: it names no file of this
            machine, and nothing of what went wrong in custom code.

    """
    from perdure.core.errors import UserError
    from perdure.federation.admin.folders import NodeFolder
    from perdure.federation.messages import BadMessage, read_header
    from perdure.federation.node.worker import make_node

    home, data = str(context.node_config["home"]), str(context.node_config.get("data", ""))
    try:
        policy = NodeFolder.read(Path(home)).policy
        return make_node(context.run_config, context.node_config, policy).serve(
            read_header(header), body
        )
    except UserError as error:
        log.warning("refused: %s", error)
        text = str(error).replace(data, "--data") if data else str(error)
        raise BadMessage(text.replace(home, "node")) from None
    except BadMessage:
        raise
    except Exception:
        log.exception("a request cannot be served")
        raise BadMessage("the node cannot serve the request; its log says why") from None


def _log_to_stderr() -> None:
    """Write the library's messages where Flower writes its own."""
    _add_handler(logging.StreamHandler(sys.stderr), "perdure: %(levelname)s: %(message)s")
    logging.getLogger("perdure").setLevel(logging.INFO)


def _log_to_file(path: Path) -> None:
    """Write the library's messages to a file too."""
    handler = logging.FileHandler(path, encoding="utf-8")
    _add_handler(handler, "%(asctime)s %(levelname)s %(message)s")
    log.info("the server starts the run")


def _add_handler(handler: logging.Handler, line_format: str) -> None:
    handler.setFormatter(logging.Formatter(line_format))
    logging.getLogger("perdure").addHandler(handler)


def _exit_with_parent() -> None:
    """End this process when the executor that started it ends.

    Flower's executors do not end their apps when they are killed: the loop of a dead server would
    continue beside the one that the next server starts, in the same run directory.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_CHECK_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
