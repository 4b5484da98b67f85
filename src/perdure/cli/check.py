"""perdure check: is a config good?"""

from __future__ import annotations

from perdure.cli.configs import Engine, File, Settings, beside, build, read
from perdure.cli.messages import listen, results
from perdure.federation.experiment import Experiment


def check(file: File, settings: Settings = None, engine: Engine = None) -> None:
    """Build everything that a config names, train nothing, write nothing."""
    listen()
    config = read(file, settings, engine)
    with beside(file):
        experiment = build(config)
    results().print(f"{file} is good: {_summary(experiment)}")


def _summary(experiment: Experiment) -> str:
    config, stream = experiment.config, experiment.stream
    weights = sum(value.numel() for value in experiment.start().server.params.values())
    rounds = config.rounds_in_all(experiment.tasks)
    return (
        f"{config.method['kind']} on {stream.kind} {config.data.source}, "
        f"{experiment.tasks} tasks over {stream.classes} classes, "
        f"{config.clients.count} clients ({config.per_round} a round), "
        f"{config.model.kind} with {weights:,} weights, {rounds} rounds"
    )
