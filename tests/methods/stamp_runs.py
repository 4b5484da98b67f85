"""Short runs of STAMP, for its tests."""

from perdure.config import parse
from perdure.training.experiment import build_experiment
from perdure.training.loop import run_stream


def config(options=None, engine="serial", **changes):
    values = {
        "stream": {"kind": "pool", "tasks": 3, "classes_per_task": 2},
        "data": {"limit": 300},
        "clients": {"count": 3},
        "model": {"hidden": [12]},
        "method": {"kind": "stamp", "budget": 5, **(options or {})},
        "train": {"rounds": 2, "local_epochs": 1, "batch_size": 16},
        "engine": {"kind": engine},
    }
    return values | changes


def finished(values):
    """An experiment at its end: the experiment, and the last state."""
    experiment = build_experiment(parse(values))
    return experiment, run_stream(experiment, experiment.initial_state(), lambda state, event: None)
