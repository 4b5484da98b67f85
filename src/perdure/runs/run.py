"""Run a config, from its first round or from its last checkpoint, to its end."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from perdure.config import Config, load, parse
from perdure.core.errors import UserError, bad_value
from perdure.core.registry import give_again
from perdure.core.states import from_tree
from perdure.core.text import argument
from perdure.core.trees import to_device
from perdure.data.streams.build import with_client_count
from perdure.deploy.custom_code import check_trust, code_folder, save_custom_code
from perdure.methods.registry import fill_defaults
from perdure.recipes import find_config
from perdure.runs import checkpoint
from perdure.runs.directory import RunDirectory, is_run
from perdure.runs.given_data import AnyConfig, giving_all, with_data
from perdure.runs.result import Result
from perdure.runs.tracking import check_tracking
from perdure.runs.writer import RunWriter, notebook_watch
from perdure.training.engines.engine import Engine
from perdure.training.events import EventCallback
from perdure.training.experiment import Experiment, build_experiment
from perdure.training.settings import complete_config, take_open_settings
from perdure.training.state import RunState

# ---- The state before the first round, which may come from another run (`model.init`)

log = logging.getLogger(__name__)


def initial_state(experiment: Experiment) -> RunState:
    """Return the state before the first round, with the server's state of the run `model.init`.

    It is taken from a run with the same model and method; else that run gives its weights alone.
    """
    state, source = experiment.initial_state(), experiment.config.model.weights_file
    if source is None or not is_run(Path(source)):
        return state
    directory = RunDirectory.open(source)
    newest = checkpoint.latest(directory.checkpoints)
    if newest is None or not _is_like(experiment.config, directory.config()):
        log.info("model.init: the weights of %s, without the state of its method", source)
        return state
    memory = to_device(newest[1]["state"]["server"]["state"], experiment.device)
    of_method = from_tree(experiment.method.ServerState, memory, "server state")
    log.info("model.init: the weights and the server's state of %s", source)
    return replace(state, server=replace(state.server, state=of_method))


def _is_like(config: Config, other: Config) -> bool:
    """Return whether two configs have the same method, and the same model with a shared head."""
    methods = [fill_defaults(each.method) for each in (config, other)]
    models = [each.model.model_dump(exclude={"init"}) for each in (config, other)]
    is_shared = config.model.head == "shared"
    return is_shared and methods[0] == methods[1] and models[0] == models[1]


# ---- Run a config, from its first round or from its last checkpoint, to its end


def run(
    config: AnyConfig,
    out: str | Path | None = None,
    resume: bool = False,
    watch: EventCallback | None = None,
    engine: Engine | None = None,
    data: Any = None,
    overwrite: bool = False,
) -> Result:
    """Train the experiment that a config describes.

    Args:
        config: A `Config`, a nested dict, or the path of a YAML file.
        out: Run directory to create. If None, nothing is written and the run cannot be resumed.
        resume: Continue the run in `out` from its last valid checkpoint; `config` must be its own.
        watch: Called as `watch(state, event)` after every round and every task. If it has an
            attribute `during`, that is called the same way as uploads arrive within a round. If
            None, a notebook shows a progress bar, and nothing is shown elsewhere.
        engine: Engine to use instead of the one that `config` names.
        data: Examples with labels, instead of those that `config` names: a tuple (x, y) of arrays
            or tensors, a dict with x_train, y_train, x_test and y_test, a map-style torch Dataset,
            a Hugging Face Dataset, or a pandas DataFrame. A list or dict of them has one per task,
            and a function with the argument `task` is asked for one task after the other.
        overwrite: Delete the run in `out`, if there is one, once the config has been checked. Files
            that are not of the run stay; a run that is in use is refused.

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
    if overwrite and resume:
        raise UserError(f"{argument('overwrite')}: must be given without {argument('resume')}")
    copies = None if overwrite else code_folder(out)  # of the run that will be deleted
    method_dir = Path(config).parent if isinstance(config, str | Path) else copies
    with ExitStack() as opened:
        if data is not None:
            config = opened.enter_context(with_data(config, data, method_dir))
        started = _as_started(config, method_dir, out if resume else None)
        complete, method = complete_config(started, method_dir)
        complete = with_client_count(complete)
        if engine is None and not complete.engine.simulates:
            if overwrite:
                raise bad_value(argument("overwrite"), True, "False with engine flower")
            shown = watch if watch is not None else notebook_watch(complete)
            return Result(*complete.engine.launch(complete, out, resume, shown, method_dir))
        check_tracking(complete.runs)
        folder = Path(out) / "clients" if out is not None else None
        experiment = build_experiment(complete, folder, method_dir, engine, method=method)
        initial = initial_state(experiment)  # may refuse the config: before anything is written
        directory = None
        if out is not None:
            directory = opened.enter_context(RunDirectory.create(out, complete, resume, overwrite))
            save_custom_code(complete, method, directory.path, method_dir)
        return RunWriter(experiment, directory, watch).finish(initial)


def resume(
    path: str | Path,
    watch: EventCallback | None = None,
    trust: bool = False,
    model: Any = None,
    data: Any = None,
    given: Sequence[Any] = (),
) -> Result:
    """Continue a run that was stopped or killed, with the same result as without the stop.

    Args:
        path: The run directory.
        watch: As in `run`.
        trust: Whether code of the run may be executed: custom methods, streams, data, models
            and metrics. Its files and their hashes are logged first.
        model: The nn.Module, if the run was made with one.
        data: The data, if the run was made with data given in Python.
        given: Data given in Python by which the run was extended.

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
    with giving_all(given, complete):
        return run(complete, out=path, resume=True, watch=watch, data=data)


def _as_started(config: AnyConfig, method_dir: Path | None, run: str | Path | None) -> Config:
    """Return the checked config with what it leaves to the method as `run` recorded it."""
    if isinstance(config, dict):
        config = parse(config, method_dir)
    elif not isinstance(config, Config):
        config = load(find_config(config))
    if run is None or not is_run(Path(run)):
        return config
    return take_open_settings(config, RunDirectory.open(run).config())
