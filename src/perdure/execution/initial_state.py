"""The state before the first round, which may come from another run (`model.init`)."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from perdure.config import Config
from perdure.contract.states import from_tree
from perdure.core.trees import to_device
from perdure.methods import fill_defaults
from perdure.runs import checkpoint
from perdure.runs.directory import RunDirectory
from perdure.runs.search import is_run
from perdure.training.experiment import Experiment
from perdure.training.state import RunState

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
    return methods[0] == methods[1] and _model(config) == _model(other) and _shared(config)


def _model(config: Config) -> dict[str, Any]:
    return config.model.model_dump(exclude={"init"})


def _shared(config: Config) -> bool:
    return config.model.head == "shared"
