"""Run a config from its first or its last round to its end, and say what came out."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from perdure.config import Config, load, parse
from perdure.contract.engine import Engine
from perdure.contract.evaluation import MODES
from perdure.contract.ledger import encode
from perdure.core.errors import UserError
from perdure.core.files import sha256
from perdure.core.trees import Tensors, Tree, to_device
from perdure.core.version import __version__
from perdure.engines import find_engine
from perdure.report.page import write_run_report
from perdure.runs import checkpoint
from perdure.runs.directory import RunDirectory, custom_method_dir, peak_rss_mb
from perdure.runs.trained_model import export_model, save_custom_method
from perdure.tracking import Tracking, check_tracking, tracking
from perdure.training.events import Event, EventCallback
from perdure.training.experiment import Experiment, build_experiment, with_method_defaults
from perdure.training.loop import run_stream
from perdure.training.metrics import metrics
from perdure.training.privacy_summary import privacy_summary
from perdure.training.state import RunState

log = logging.getLogger(__name__)
FORMAT = 2
"""Of checkpoints: states are the dataclasses of the contract since 2."""


@dataclass(frozen=True)
class Result:
    """The outcome of a run: `values` is result.json."""

    values: dict[str, Any]
    path: Path | None

    @property
    def matrix(self) -> dict[str, Any]:
        """Accuracy on task j after task i, by mode of inference."""
        matrix: dict[str, Any] = self.values["matrix"]
        return matrix

    @property
    def metrics(self) -> dict[str, Any]:
        """The metrics by mode of inference."""
        found: dict[str, Any] = self.values["metrics"]
        return found


def run(
    config: Config | dict[str, Any] | str | Path,
    out: str | Path | None = None,
    resume: bool = False,
    watch: EventCallback | None = None,
    engine: Engine | None = None,
) -> Result:
    """Train what a config describes.

    config: a Config, plain values, or the path of a YAML file. out: the run directory; without it
    nothing is written. watch: called after each round and each task's end (and, if it has a
    function `during`, that one while clients of a round report). engine: in place of the
    one that the config names.

    >>> tiny = {"stream": {"tasks": 1}, "train": {"rounds": 1}, "engine": {"kind": "serial"}}
    >>> round(run(tiny).metrics["task_agnostic"]["ACC"], 1) > 0.1
    True
    """
    method_dir = Path(config).parent if isinstance(config, str | Path) else custom_method_dir(out)
    checked = with_method_defaults(_checked(config), method_dir)
    launch = getattr(find_engine(checked.engine.kind), "launch", None)
    if launch is not None and engine is None:
        return Result(*launch(checked, out, resume, watch, method_dir))
    folder = Path(out) / "clients" if out is not None else None
    check_tracking(checked.runs)
    experiment = build_experiment(checked, folder, method_dir, engine)
    initial = experiment.initial_state()  # may refuse the config: before anything is written
    if out is None:
        return _Run(experiment, None, watch).go(initial)
    with RunDirectory.create(out, checked, resume) as directory:
        save_custom_method(experiment.method, directory.path)
        return _Run(experiment, directory, watch).go(initial)


def resume(path: str | Path, watch: EventCallback | None = None) -> Result:
    """Go on with a run that was stopped or killed."""
    return run(RunDirectory.open(path).config(), out=path, resume=True, watch=watch)


def _checked(config: Config | dict[str, Any] | str | Path) -> Config:
    if isinstance(config, Config):
        return config
    return parse(config) if isinstance(config, dict) else load(config)


class _Run:
    """One process's part of a run."""

    def __init__(
        self, experiment: Experiment, directory: RunDirectory | None, watch: EventCallback | None
    ) -> None:
        self.experiment, self.directory, self.watch = experiment, directory, watch
        self.manifests: dict[str, Tree] = {}
        self.tracking = Tracking([])

    def go(self, initial: RunState) -> Result:
        """From the last good checkpoint, or from the initial, to the end."""
        state = self._restored() or initial
        with self._tracked():
            during = getattr(self.watch, "during", None)
            state = run_stream(self.experiment, state, self._after, during)
        values = result(self.experiment, state)
        if self.directory is not None:
            export_model(self.directory.model, self.experiment, state)
            self.directory.save_result(values)
            if self.experiment.config.runs.report:
                write_run_report(self.directory.path)
        return Result(values, self.directory.path if self.directory else None)

    @contextmanager
    def _tracked(self) -> Iterator[None]:
        if self.directory is None:
            yield
            return
        config, events = self.experiment.config, self.directory.events()
        with tracking(config, self.directory.path, events) as self.tracking:
            yield

    def _restored(self) -> RunState | None:
        if self.directory is None:
            return None
        self.manifests = _manifests(self.directory.checkpoints)
        found = checkpoint.latest(self.directory.checkpoints, self._check_clients)
        if found is not None:
            _check_format(self.directory.path, found[1])
        self.directory.truncate_events(found[1]["events"] if found else 0)
        if found is None:
            return None
        tree = to_device(found[1], self.experiment.device)
        self.experiment.store.restore(tree["clients"])
        self.experiment.engine.restore(tree["engine"])
        state = RunState.from_tree(tree["state"], self.experiment.method)
        if state.task < self.experiment.task_count:
            log.info("resuming at task %d, round %d", state.task + 1, state.round + 1)
            _warn_of_threads(tree.get("threads"))
        return state

    def _check_clients(self, tree: Tree) -> None:
        """ValueError if what clients kept at a checkpoint is not there as it was."""
        self.experiment.store.check(tree["clients"])

    def _after(self, state: RunState, event: Event) -> None:
        if self.directory is not None:
            self.directory.append_event(event)
            every = self.experiment.config.runs.checkpoint_every
            if event["event"] == "task" or state.round % every == 0:
                self._checkpoint(self.directory, state)
        self.tracking.log(event)
        if self.watch is not None:
            self.watch(state, event)

    def _checkpoint(self, directory: RunDirectory, state: RunState) -> None:
        """Clients' states first, then the checkpoint that names them, then the cleaning up."""
        store = self.experiment.store
        manifest = store.commit()
        tree = {
            "format": FORMAT,
            "state": state.to_tree(),
            "clients": manifest,
            "engine": self.experiment.engine.choice(),
            "events": directory.events_size(),
            "threads": torch.get_num_threads(),
        }
        saved = checkpoint.save(directory.checkpoints, state.checkpoint_number, tree)
        checkpoint.prune(directory.checkpoints, self.experiment.config.runs.keep)
        if manifest or self.manifests:
            self.manifests[saved.name] = manifest
            there = {path.name for path in checkpoint.paths(directory.checkpoints)}
            self.manifests = {name: m for name, m in self.manifests.items() if name in there}
            store.sweep(list(self.manifests.values()))


def _check_format(run: Path, tree: Tree) -> None:
    """Refuse a checkpoint whose states are those of another contract."""
    made = tree.get("format", 1)
    if made != FORMAT:
        raise UserError(
            f"{run}: its checkpoints are of format {made}, this version resumes format {FORMAT}; "
            "finish the run with the version that began it, or begin it anew"
        )


def _warn_of_threads(before: int | None) -> None:
    """Sums are made in another order with another number of threads."""
    now = torch.get_num_threads()
    if before not in (None, now):
        log.warning(
            "the run began with %d threads and goes on with %d: its last digits may differ from "
            "those of a run that was not stopped (OMP_NUM_THREADS=%d keeps them)",
            before, now, before,
        )  # fmt: skip


def _manifests(folder: Path) -> dict[str, Tree]:
    """The clients' files that each checkpoint on disk needs."""
    found: dict[str, Tree] = {}
    for path in checkpoint.paths(folder):
        try:
            found[path.name] = checkpoint.read(path)["clients"]
        except (OSError, ValueError):
            continue  # named in the log when the newest good one is looked for
    return {name: manifest for name, manifest in found.items() if manifest}


def result(experiment: Experiment, state: RunState) -> dict[str, Any]:
    """What result.json says."""
    modes = [m for m in MODES if state.matrix[m] and state.matrix[m][0][0] is not None]
    return {
        "perdure": __version__,
        "method": experiment.config.method["kind"],
        "seed": experiment.config.seed,
        "tasks": experiment.task_count,
        "engine": experiment.engine.name,
        "chunk": experiment.engine.choice().get("chunk"),
        "matrix": {mode: state.matrix[mode] if mode in modes else None for mode in MODES},
        "metrics": {m: metrics(state.matrix[m]) if m in modes else None for m in MODES},
        "routing": state.routing if "routed" in modes else None,
        "confusion": state.confusion,
        "bytes": state.ledger.summary(),
        "seconds": _seconds(state),
        "rounds": state.counters.rounds,
        "client_updates": state.counters.client_updates,
        "rejected_updates": state.counters.rejected,
        "missing_reports": state.counters.missing,
        "failures": state.counters.failures,
        "repeated_rounds": state.counters.repeated,
        "privacy": privacy_summary(experiment, state),
        "threads": torch.get_num_threads(),
        "peak_rss_mb": peak_rss_mb(),
        "model_sha256": model_hash(state.server.params | state.server.buffers),
    }


def _seconds(state: RunState) -> dict[str, Any]:
    parts = {part: round(value, 3) for part, value in state.seconds.items()}
    begins = [0.0, *state.task_end_seconds]
    spent = [end - begin for begin, end in pairwise(begins)]
    return {**parts, "by_task": [round(value, 3) for value in spent]}


def model_hash(params: Tensors) -> str:
    """A hash of the names, shapes and bits of a model."""
    return sha256(encode({name: value.cpu() for name, value in params.items()}))
