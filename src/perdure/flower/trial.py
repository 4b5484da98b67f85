"""A whole federation on this machine, for one run: server, nodes, certificates, on loopback."""

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
from perdure.flower.folders import NodeFolder, ServerFolder, node_name
from perdure.flower.node_process import running_nodes
from perdure.flower.processes import Child, executable, free_port
from perdure.flower.scaffold import create_federation
from perdure.flower.server_process import running_server
from perdure.flower.server_stream import node_count
from perdure.flower.submission import Submission, create_submission, start, unfinished
from perdure.runs.directory import RunDirectory
from perdure.runs.event_log import LineReader, progress_events
from perdure.training.events import Event, EventCallback
from perdure.training.experiment import build_experiment
from perdure.training.state import RunState

log = logging.getLogger(__name__)
_POLL = 0.3


def run_trial(
    config: Config,
    out: str | Path | None,
    resume: bool,
    watch: EventCallback | None,
    method_dir: Path | None,
) -> tuple[dict[str, Any], Path | None]:
    """Run a config over processes of its own; result.json and the run directory."""
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
    if not (home / "README.md").is_file():  # its last file
        shutil.rmtree(home, ignore_errors=True)
        home.parent.mkdir(parents=True, exist_ok=True)
        create_federation(home, node_count(config), "127.0.0.1", free_port())
    with federation(home) as (folder, children):
        before = unfinished(folder)
        submission = before[0] if before else create_submission(folder, config, out, method_dir)
        start(folder, submission)
        return follow(submission, out, children, watch)


@contextmanager
def federation(home: Path) -> Iterator[tuple[ServerFolder, list[Child]]]:
    """The server and all nodes of a federation on this machine."""
    there = ServerFolder.read(home / "server")
    folder = ServerFolder(there.path, free_port(), there.nodes)
    with ExitStack() as stack:
        children = [stack.enter_context(running_server(folder, lasting=False))]
        threads = max(1, (os.cpu_count() or 1) // folder.nodes)  # nodes share the cores
        for number in range(folder.nodes):
            place = home.resolve() / node_name(number)
            node = NodeFolder(place, number, f"127.0.0.1:{folder.port}")
            children.append(stack.enter_context(running_nodes(node, threads=threads)))
        for child in children:
            stack.callback(child.terminate)
        yield folder, children


def follow(
    submission: Submission, out: Path, children: list[Child], watch: EventCallback | None = None
) -> dict[str, Any]:
    """Wait for the end of a run, tell of its rounds, and return its result."""
    events, warnings = EventForwarder(out), LineReader(submission.log, from_end=True)
    while (outcome := submission.outcome) is None:
        for child in children[:1]:  # without its server a run cannot go on, without a node it can
            child.check()
        events.forward(watch)
        _warn(warnings)
        time.sleep(_POLL)
    events.forward(watch)
    _warn(warnings)
    if outcome["state"] == "refused":
        raise UserError(outcome["reason"])
    if outcome["state"] != "done":
        raise RunError(outcome["reason"])
    return RunDirectory.open(out).load_result()


def _warn(lines: LineReader) -> None:
    """Pass on what the server's part warns of."""
    for line in lines.read_new():
        _, mark, text = line.decode(errors="replace").partition(" WARNING ")
        if mark:
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
            state.task, state.round = event["task"], event["round"] + 1
        else:
            state.task, state.round = event["task"] + 1, 0
        return state
