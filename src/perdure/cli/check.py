"""perdure check: is a config good?"""

from __future__ import annotations

from typing import Annotated

import typer

from perdure.cli.arguments import Engine, File, Settings, build, method_dir, read
from perdure.cli.console import setup_logging, stdout_console
from perdure.core.errors import RunError
from perdure.execution.dry_run import DryRun, dry_run
from perdure.training.experiment import Experiment

DryRunFlag = Annotated[
    bool,
    typer.Option("--dry-run", help="Train two tasks of one round on both engines and compare."),
]


def check(
    file: File, settings: Settings = None, engine: Engine = None, trial: DryRunFlag = False
) -> None:
    """Build everything that a config names and write nothing; with --dry-run, try it."""
    setup_logging()
    config = read(file, settings, engine)
    with method_dir(file):
        experiment = build(config)
        stdout_console().print(f"{file} is good: {_summary(experiment)}")
        if trial:
            stdout_console().print(_verdict(dry_run(config, file.parent)))


def _verdict(trial: DryRun) -> str:
    where = f"{trial.difference:.1e}, in {trial.parameter}"
    if not trial.agrees:
        raise RunError(
            f"--dry-run: serial and vector differ by {where}, more than rounding: a function of "
            "the method gives another value for a stack of clients than for one"
        )
    kind = "" if trial.stacked else ", though clients could not be stacked: vector ran serially"
    return (
        f"dry run: {trial.tasks} tasks of one round; serial and vector agree (largest difference "
        f"{where}){kind}"
    )


def _summary(experiment: Experiment) -> str:
    config, stream = experiment.config, experiment.stream
    weights = sum(value.numel() for value in experiment.initial_state().server.params.values())
    rounds = config.total_rounds(experiment.task_count)
    return (
        f"{config.method['kind']} on {stream.kind} {config.data.source}, "
        f"{experiment.task_count} tasks over {stream.classes} classes, "
        f"{config.clients.count} clients ({config.per_round} per round), "
        f"{config.model.kind} with {weights:,} weights, {rounds} rounds"
    )
