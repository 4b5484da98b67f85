"""Run a whole federation on this machine for one run: server and nodes on loopback."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from perdure.config import Config
from perdure.contract.context import Server
from perdure.core.errors import RunError, UserError
from perdure.core.event_log import Event, LineReader, progress_events
from perdure.federation.admin.folders import NodeFolder, ServerFolder, create_federation, node_name
from perdure.federation.admin.processes import (
    Child,
    executable,
    free_port,
    running_node,
    running_server,
)
from perdure.federation.admin.submission import (
    Submission,
    create_submission,
    start_submission,
    unfinished_submissions,
)
from perdure.federation.node.policy import TRIAL
from perdure.federation.settings import node_count
from perdure.runs.directory import RunDirectory
from perdure.training.events import EventCallback
from perdure.training.experiment import build_experiment
from perdure.training.state import RunState

log = logging.getLogger(__name__)
_POLL_SECONDS = 0.3


def run_trial(
    config: Config,
    out: str | Path | None,
    resume: bool,
    watch: EventCallback | None,
    method_dir: Path | None,
) -> tuple[dict[str, Any], Path | None]:
    """Run a config in a federation of processes on this machine.

    Raises:
        UserError: The config is invalid.
        RunError: The run failed.

    """
    if config.federation is not None:
        raise UserError("federation: only allowed in a run of perdure federation submit")
    executable("flower-superlink")
    experiment = build_experiment(config, method_dir=method_dir)
    experiment.initial_state()  # may refuse the config: before anything is written
    if out is None:
        with tempfile.TemporaryDirectory(prefix="perdure-") as folder:
            return _run(config, Path(folder) / "run", watch, method_dir), None
    RunDirectory.check_can_create(out, config, resume)
    return _run(config, Path(out), watch, method_dir), Path(out)


def _run(
    config: Config, out: Path, watch: EventCallback | None, method_dir: Path | None
) -> dict[str, Any]:
    home = out / "federation"
    if not (home / "README.md").is_file():  # its last file: creation was complete
        shutil.rmtree(home, ignore_errors=True)
        home.parent.mkdir(parents=True, exist_ok=True)
        create_federation(home, node_count(config), "127.0.0.1", free_port(), TRIAL)
    with running_federation(home) as (folder, children):
        earlier = unfinished_submissions(folder)
        submission = earlier[0] if earlier else create_submission(folder, config, out, method_dir)
        start_submission(folder, submission)
        return follow(submission, out, children, watch)


@contextmanager
def running_federation(home: Path) -> Iterator[tuple[ServerFolder, list[Child]]]:
    """Run server and all nodes while the block runs."""
    stored = ServerFolder.read(home / "server")
    folder = ServerFolder(stored.path, free_port(), stored.nodes)
    with ExitStack() as stack:
        children = [stack.enter_context(running_server(folder, persistent=False))]
        threads = max(1, (os.cpu_count() or 1) // folder.nodes)  # nodes share the cores
        for number in range(folder.nodes):
            node_path = home.resolve() / node_name(number)
            node = NodeFolder(node_path, number, f"127.0.0.1:{folder.port}", TRIAL)
            children.append(stack.enter_context(running_node(node, threads=threads)))
        for child in children:
            stack.callback(child.terminate)
        yield folder, children


def follow(
    submission: Submission, out: Path, children: list[Child], watch: EventCallback | None = None
) -> dict[str, Any]:
    """Wait for the end of a run, and return the content of result.json.

    Raises:
        UserError: The run was refused.
        RunError: The run failed, or the server ended.

    """
    events, log_lines = EventForwarder(out), LineReader(submission.log, from_end=True)
    while (outcome := submission.outcome) is None:
        for child in children[:1]:  # a run needs its server, but can continue without a node
            child.check()
        events.forward(watch)
        _forward_warnings(log_lines)
        time.sleep(_POLL_SECONDS)
    events.forward(watch)
    _forward_warnings(log_lines)
    if outcome["state"] == "refused":
        raise UserError(outcome["reason"])
    if outcome["state"] != "done":
        raise RunError(outcome["reason"])
    return RunDirectory.open(out).load_result()


def _forward_warnings(lines: LineReader) -> None:
    """Log the warnings of the server again."""
    for line in lines.read_new():
        _, level, text = line.decode(errors="replace").partition(" WARNING ")
        if level:
            log.warning("%s", text)


class EventForwarder:
    """Calls a callback for the events of a run that another process trains, as the loop would."""

    def __init__(self, out: Path) -> None:
        self._lines, self._start = LineReader(out / "events.jsonl"), time.monotonic()
        self._state = RunState(Server({}))
        self._count(self._lines.read_new())

    def forward(self, watch: EventCallback | None) -> None:
        """Call `watch` for the events since the last time."""
        lines = self._lines.read_new()
        if self._lines.was_truncated:  # resumed at an earlier checkpoint
            self._state = RunState(Server({}))
            self._count(lines)
        elif watch is not None:
            for event in progress_events(lines):
                watch(self._state_after(event), event)

    def _count(self, lines: list[bytes]) -> None:
        for event in progress_events(lines):
            self._state_after(event)

    def _state_after(self, event: Event) -> RunState:
        state = self._state
        state.seconds["total"] = time.monotonic() - self._start
        if event["event"] == "round":
            state.counters.rounds += 1
            state.task, state.round = event["task"], event.get("round", 0) + 1
        else:
            state.task, state.round = event["task"] + 1, 0
        return state
