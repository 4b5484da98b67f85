"""Run a config, from its first round or from its last checkpoint, to its end."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from perdure.config import Config, load, parse
from perdure.contract.engine import Engine
from perdure.core.errors import UserError
from perdure.core.given import give_again
from perdure.core.trees import Tree, to_device
from perdure.data.streams.client_count import with_client_count
from perdure.engines import find_engine
from perdure.execution.given_data import AnyConfig, with_data
from perdure.execution.result import Result, result_values
from perdure.recipes import find_config
from perdure.report.page import write_run_report
from perdure.runs import checkpoint
from perdure.runs.custom_code import check_trust, code_folder, save_custom_code
from perdure.runs.directory import RunDirectory
from perdure.runs.model_files import export_model
from perdure.runs.search import is_run
from perdure.tracking import Tracking, check_tracking, open_tracking
from perdure.training.events import Event, EventCallback
from perdure.training.experiment import Experiment, build_experiment
from perdure.training.loop import run_stream
from perdure.training.open_settings import take_open_settings, with_method_defaults
from perdure.training.state import RunState

log = logging.getLogger(__name__)
CHECKPOINT_FORMAT = 2
"""Version of the checkpoints: since 2, states are dataclasses that a method declares."""


def run(
    config: AnyConfig,
    out: str | Path | None = None,
    resume: bool = False,
    watch: EventCallback | None = None,
    engine: Engine | None = None,
    data: Any = None,
) -> Result:
    """Train the experiment that a config describes.

    Args:
        config: A `Config`, a nested dict, or the path of a YAML file.
        out: Run directory to create. If None, nothing is written and the run cannot be resumed.
        resume: Continue the run in `out` from its last valid checkpoint; `config` must be its own.
        watch: Called as `watch(state, event)` after every round and every task. If it has an
            attribute `during`, that is called the same way as uploads arrive within a round.
        engine: Engine to use instead of the one that `config` names.
        data: Examples with labels, instead of those that `config` names: a tuple (x, y) of arrays
            or tensors, a dict with x_train, y_train, x_test and y_test, a map-style torch Dataset,
            a Hugging Face Dataset, or a pandas DataFrame. A list or dict of them has one per task,
            and a function with the argument `task` is asked for one task after the other.

    Returns:
        The result. `result.matrix[mode][i][j]` is the accuracy (0 to 1) on task j after task i,
        both from 0; None for j > i. `mode` is "task_agnostic", "task_aware" or "routed"; its
        matrix is None if the method cannot route.

    Raises:
        UserError: The config, a file or `out` is invalid. Nothing was trained or written.
        RunError: The run failed. Finished rounds are saved in `out`; call `perdure.resume(out)`.

    Example:
        >>> import perdure
        >>> result = perdure.run({"stream": {"tasks": 2}, "train": {"rounds": 1}})
        >>> len(result.matrix["task_agnostic"])
        2
    """
    method_dir = Path(config).parent if isinstance(config, str | Path) else code_folder(out)
    if data is None:
        return _run(config, out, resume, watch, engine, method_dir)
    with with_data(config, data, method_dir) as named:
        return _run(named, out, resume, watch, engine, method_dir)


def _run(
    config: AnyConfig,
    out: str | Path | None,
    resume: bool,
    watch: EventCallback | None,
    engine: Engine | None,
    method_dir: Path | None,
) -> Result:
    """Train a config that names its data; else as `run`."""
    started = _as_started(config, method_dir, out if resume else None)
    complete = with_client_count(with_method_defaults(started, method_dir))
    launch = getattr(find_engine(complete.engine.kind), "launch", None)
    if launch is not None and engine is None:
        return Result(*launch(complete, out, resume, watch, method_dir))
    folder = Path(out) / "clients" if out is not None else None
    check_tracking(complete.runs)
    experiment = build_experiment(complete, folder, method_dir, engine)
    initial = experiment.initial_state()  # may refuse the config: before anything is written
    if out is None:
        return _Run(experiment, None, watch).finish(initial)
    with RunDirectory.create(out, complete, resume) as directory:
        save_custom_code(complete, directory.path, method_dir)
        return _Run(experiment, directory, watch).finish(initial)


def resume(
    path: str | Path,
    watch: EventCallback | None = None,
    trust: bool = False,
    model: Any = None,
    data: Any = None,
) -> Result:
    """Continue a run that was stopped or killed, with the same result as without the stop.

    Args:
        path: The run directory.
        watch: As in `run`.
        trust: Whether code of the run may be executed: custom methods, streams, data and models.
            Its files and their hashes are logged first.
        model: The nn.Module, if the run was made with one.
        data: The data, if the run was made with data given in Python.

    Returns:
        The result, as `run` returns it. A finished run is not trained again.

    Raises:
        UserError: `path` is not a run directory, it was written by an incompatible version, or it
            needs code that is not trusted.
        RunError: The run failed.
    """
    directory = RunDirectory.open(path)
    config = directory.config()
    give_again(config.model.kind, model, exactly=True)
    check_trust(config, directory.path, trust, stream=True, data=data is None)
    complete = directory.config(code_folder(path))
    return run(complete, out=path, resume=True, watch=watch, data=data)


def _parsed(config: AnyConfig, method_dir: Path | None) -> Config:
    if isinstance(config, Config):
        return config
    return parse(config, method_dir) if isinstance(config, dict) else load(find_config(config))


def _as_started(config: AnyConfig, method_dir: Path | None, run: str | Path | None) -> Config:
    """Return the checked config with what it leaves to the method as `run` recorded it."""
    checked = _parsed(config, method_dir)
    if run is None or not is_run(Path(run)):
        return checked
    return take_open_settings(checked, RunDirectory.open(run).config())


class _Run:
    """Trains an experiment and writes its run directory."""

    def __init__(
        self, experiment: Experiment, directory: RunDirectory | None, watch: EventCallback | None
    ) -> None:
        self.experiment, self.directory, self.watch = experiment, directory, watch
        self.manifests: dict[str, Tree] = {}
        """The client state files that each checkpoint on disk refers to, by its file name."""
        self.tracking = Tracking([])

    def finish(self, initial: RunState) -> Result:
        """Train from the last valid checkpoint, or from `initial`, to the end."""
        state = self._restore() or initial
        with self._tracked():
            during = getattr(self.watch, "during", None)
            state = run_stream(self.experiment, state, self._after, during)
        values = result_values(self.experiment, state)
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
        with open_tracking(config, self.directory.path, events) as self.tracking:
            yield

    def _restore(self) -> RunState | None:
        """Return the state of the last valid checkpoint, or None if there is none."""
        if self.directory is None:
            return None
        self.manifests = _manifests(self.directory.checkpoints)
        latest = checkpoint.latest(self.directory.checkpoints, self._check_client_states)
        if latest is None:
            self.directory.truncate_events(0)
            return None
        _check_format(self.directory.path, latest[1])
        self.experiment.stream.check_data(latest[1].get("data") or {})
        self.directory.truncate_events(latest[1]["events"])
        tree = to_device(latest[1], self.experiment.device)
        self.experiment.store.restore(tree["clients"])
        self.experiment.engine.restore(tree["engine"])
        state = RunState.from_tree(tree["state"], self.experiment.method)
        if state.task < self.experiment.task_count:
            log.info("resuming at task %d, round %d", state.task + 1, state.round + 1)
            _warn_of_threads(tree.get("threads"))
        return state

    def _check_client_states(self, tree: Tree) -> None:
        """Raise OSError or ValueError if a client state of a checkpoint is lost or altered."""
        self.experiment.store.check(tree["clients"])

    def _after(self, state: RunState, event: Event) -> None:
        if self.directory is not None:
            self.directory.append_event(event)
            every = self.experiment.config.runs.checkpoint_every
            if event["event"] == "task" or state.round % every == 0:
                self._save_checkpoint(self.directory, state)
        self.tracking.log(event)
        if self.watch is not None:
            self.watch(state, event)

    def _save_checkpoint(self, directory: RunDirectory, state: RunState) -> None:
        """Write the client states, then the checkpoint that refers to them; then clean up."""
        store = self.experiment.store
        manifest = store.commit()
        tree = {
            "format": CHECKPOINT_FORMAT,
            "state": state.to_tree(),
            "clients": manifest,
            "engine": self.experiment.engine.choice(),
            "events": directory.events_size(),
            "threads": torch.get_num_threads(),
            "data": self.experiment.stream.data_hashes,
        }
        path = checkpoint.save(directory.checkpoints, state.checkpoint_number, tree)
        checkpoint.prune(directory.checkpoints, self.experiment.config.runs.keep_checkpoints)
        if manifest or self.manifests:
            self.manifests[path.name] = manifest
            names = {path.name for path in checkpoint.paths(directory.checkpoints)}
            self.manifests = {name: m for name, m in self.manifests.items() if name in names}
            store.sweep(list(self.manifests.values()))


def _check_format(run: Path, tree: Tree) -> None:
    """Refuse a checkpoint of an incompatible version."""
    version = tree.get("format", 1)
    if version != CHECKPOINT_FORMAT:
        raise UserError(
            f"{run}: checkpoints must be of format {CHECKPOINT_FORMAT}, got format {version}; "
            "finish the run with the version of perdure that started it, or start a new run"
        )


def _warn_of_threads(before: int | None) -> None:
    """Warn if the number of threads changed, which changes the order of sums."""
    now = torch.get_num_threads()
    if before not in (None, now):
        log.warning(
            "the run started with %d threads and continues with %d: its last digits may differ "
            "from those of a run without a stop (OMP_NUM_THREADS=%d avoids that)",
            before, now, before,
        )  # fmt: skip


def _manifests(folder: Path) -> dict[str, Tree]:
    manifests: dict[str, Tree] = {}
    for path in checkpoint.paths(folder):
        try:
            manifests[path.name] = checkpoint.read(path)["clients"]
        except (OSError, ValueError):
            continue  # checkpoint.latest logs it
    return {name: manifest for name, manifest in manifests.items() if manifest}
