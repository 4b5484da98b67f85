"""perdure check: build the experiment of a config without training it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated, Any

import typer

from perdure.cli.console import print_json, setup_logging, stdout_console
from perdure.cli.options import ConfigPath, EngineKind, Json, Settings, importing_from, read_config
from perdure.cli.run import build_and_start
from perdure.core.errors import RunError
from perdure.data.streams.build import client_rows
from perdure.runs.trial import DryRun, dry_run
from perdure.training.experiment import Experiment

DryRunFlag = Annotated[
    bool,
    typer.Option(
        "--dry-run", help="Train two tasks of one round on serial and vector, and compare them."
    ),
]


def check(
    path: ConfigPath,
    settings: Settings = None,
    engine: EngineKind = None,
    with_dry_run: DryRunFlag = False,
    as_json: Json = False,
) -> None:
    """Check a config: build its data, model and method, and write nothing."""
    setup_logging(quiet=as_json)
    config = read_config(path, settings, engine)
    with importing_from(path.parent):
        facts = summary(build_and_start(config))
        if not as_json:
            stdout_console().print(f"{path} is valid: {_sentence(facts)}")
            for line in _client_lines(facts["client_rows"]):
                stdout_console().print(line, soft_wrap=True)
        trial = dry_run(config, path.parent) if with_dry_run else None
    if as_json:
        print_json({"config": str(path), **facts, "dry_run": _dry_run_facts(trial)})
    if trial is not None:
        _require_agreement(trial)
        if not as_json:
            stdout_console().print(_dry_run_sentence(trial))


def summary(experiment: Experiment) -> dict[str, Any]:
    """Return the size of an experiment: its tasks, classes, clients, weights and rounds."""
    config, stream = experiment.config, experiment.stream
    params = experiment.initial_state().server.params
    return {
        "method": config.method["kind"],
        "stream": stream.kind,
        "source": config.data.source,
        "tasks": experiment.task_count,
        "classes": stream.classes,
        "target": config.data.target,
        "clients": config.clients.count,
        "per_round": config.per_round,
        "client_rows": client_rows(stream),
        "model": config.model.kind,
        "weights": sum(value.numel() for value in params.values()),
        "rounds": config.total_rounds(experiment.task_count),
    }


def _sentence(facts: dict[str, Any]) -> str:
    over = "numbers" if facts["target"] == "number" else f"{facts['classes']} classes"
    return (
        f"{{method}} on {{stream}} {{source}}, {{tasks}} tasks over {over}, {{clients}} clients "
        "({per_round} per round), {model} with {weights:,} weights, {rounds} rounds"
    ).format(**facts)


def _client_lines(found: dict[str, Any] | None) -> Iterator[str]:
    """Yield a line per client that the data names: its training rows in each task."""
    if found is None:
        return
    yield "training rows of each client, by task:"
    for name, rows in zip(found["names"], found["rows"], strict=True):
        yield f"  {name}: {', '.join(f'{count:,}' for count in rows)}"


def _dry_run_facts(trial: DryRun | None) -> dict[str, Any] | None:
    return None if trial is None else {**asdict(trial), "agrees": trial.agrees}


def _require_agreement(trial: DryRun) -> None:
    if not trial.agrees:
        raise RunError(
            f"--dry-run: serial and vector differ by {_difference(trial)}, more than rounding: a "
            "function of the method returns different values for stacked and for single clients"
        )


def _dry_run_sentence(trial: DryRun) -> str:
    note = "" if trial.stacked else "; clients could not be stacked, so vector ran serially"
    return (
        f"dry run: {trial.tasks} tasks of one round; serial and vector agree (largest difference "
        f"{_difference(trial)}){note}"
    )


def _difference(trial: DryRun) -> str:
    return f"{trial.difference:.1e}, in {trial.parameter}"
