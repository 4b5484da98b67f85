"""perdure run: train the experiment of a config, and show its progress."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from perdure.cli.console import number, print_json, resumable, setup_logging, stdout_console
from perdure.cli.options import (
    ConfigPath,
    EngineKind,
    Json,
    Quiet,
    Settings,
    importing_from,
    read_config,
    repeat_option,
)
from perdure.config import Config
from perdure.core.event_log import Event
from perdure.evaluation.metrics import MAIN
from perdure.runs.progress import accuracies_so_far, expected_tasks
from perdure.runs.result import Result
from perdure.runs.run import run as run_config
from perdure.training.events import EventCallback
from perdure.training.experiment import Experiment, build_experiment
from perdure.training.state import RunState

# ---- Progress of one run: bars on a terminal, one line per task elsewhere, or nothing


@contextmanager
def show_progress(config: Config, quiet: bool, name: str = "") -> Iterator[EventCallback | None]:
    """Yield the function to call after each round and each task; None if `quiet`."""
    if quiet:
        yield None
    elif sys.stdout.isatty():
        bars = ProgressBars(config, name)
        with bars.progress:
            yield bars
    else:
        yield PlainProgress(config, name, stdout_console()).print_event


def measure_word(config: Config) -> str:
    """Return the name of what the accuracy matrix of a run holds."""
    return MAIN[config.data.target]


class PlainProgress:
    """Prints one line per task."""

    def __init__(self, config: Config, name: str, console: Console) -> None:
        self.config, self.console = config, console
        self.name, self.loss = f"{name} " if name else "", ""

    def print_event(self, state: RunState, event: Event) -> None:
        """Print a line if a task has ended; called after each round and each task."""
        if event["event"] != "task":
            self.loss = f", training loss {event['loss']:.3f}" if "loss" in event else ""
            return
        mode, values = accuracies_so_far(event)
        tasks = len(event["accuracy"]["task_agnostic"])
        mean = sum(values) / len(values)
        self.console.print(
            f"{self.name}task {event['task'] + 1} of {tasks}: {mode} {measure_word(self.config)} "
            f"{number(values[-1])} on it, {number(mean)} on all so far{self.loss}; "
            f"{state.counters.rounds} rounds, {state.seconds['total']:.1f} s"
        )


class ProgressBars:
    """Bars for all rounds, the task and its clients, with the remaining time and the accuracy."""

    def __init__(self, config: Config, name: str) -> None:
        self.config, self.name = config, name
        self.tasks = expected_tasks(config)
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=stdout_console(),
        )
        self.rounds = self.progress.add_task(
            self._title("all rounds"), total=self._total_rounds(), note=""
        )
        self.task = self.progress.add_task(self._task_title(0), total=config.rounds(0), note="")
        self.clients = self.progress.add_task("clients", total=config.clients.per_round, note="")
        self.started = False
        self.attempt: tuple[int, ...] = ()

    def __call__(self, state: RunState, event: Event) -> None:
        """Update the bars after a round or a task."""
        if event["event"] == "task":
            self._show_task_end(state, event)
        else:
            self._show_round(state, event)

    def during(self, state: RunState, event: Event) -> None:
        """Update the bar of the clients as their uploads arrive."""
        if not self.started:
            self._start(state)
        attempt = (event["task"], event["round"], event["attempt"])
        if attempt != self.attempt:
            self.attempt = attempt
            self.progress.reset(self.clients, total=event["sampled"])
        self.progress.advance(self.clients, event["done"])

    def _start(self, state: RunState) -> None:
        """Set the rounds of a resumed run, which must not count for the remaining time."""
        self.started = True
        self.progress.reset(
            self.rounds, total=self._total_rounds(), completed=state.counters.rounds
        )

    def _show_round(self, state: RunState, event: Event) -> None:
        clients = f"{event['clients']} of {event['sampled']} clients uploaded"
        accuracy = event.get("accuracy")
        word = measure_word(self.config)
        shown = f", {word} {number(accuracy['task_agnostic'])}" if accuracy else ""
        loss = f", training loss {event['loss']:.3f}" if "loss" in event else ""
        note = f"{clients}{loss}{shown}"
        self.progress.update(self.rounds, completed=state.counters.rounds)
        self._show_task(event["task"], state.round, note)

    def _show_task_end(self, state: RunState, event: Event) -> None:
        self.tasks = len(event["accuracy"]["task_agnostic"])
        mode, values = accuracies_so_far(event)
        mean = number(sum(values) / len(values))
        note = f"{mode} {measure_word(self.config)} {mean} after task {state.task}"
        done = state.counters.rounds
        self.progress.update(self.rounds, total=self._total_rounds(), completed=done, note=note)
        if state.task < self.tasks:
            self._show_task(state.task, 0, "")

    def _show_task(self, task: int, done: int, note: str) -> None:
        self.progress.update(
            self.task,
            description=self._task_title(task),
            total=self.config.rounds(task),
            completed=done,
            note=note,
        )

    def _task_title(self, task: int) -> str:
        return f"task {task + 1} of {self.tasks}" if self.tasks else f"task {task + 1}"

    def _total_rounds(self) -> int | None:
        if self.tasks is None:
            return None
        return self.config.total_rounds(self.tasks)

    def _title(self, text: str) -> str:
        return f"{self.name} {text}".strip()


def result_line(config: Config, result: Result) -> str:
    """Return the result of a run in one line."""
    modes = (mode for mode in result.metrics if result.metrics[mode])
    of_what = "" if result.measure == "accuracy" else f" {result.measure}"
    accuracies = "; ".join(
        f"{mode}{of_what} {_headline(result.metrics[mode])}{_scores(result, mode)}"
        for mode in modes
    )
    where = f", in {result.path}" if result.path else ""
    method = config.method["kind"]
    return (
        f"{method} on {config.stream.kind} {config.data.source}, seed {config.seed}: "
        f"{accuracies}{where}"
    )


def _headline(metrics: dict[str, float | None]) -> str:
    return " ".join(f"{key} {number(metrics[key])}" for key in ("ACC", "FGT", "learned"))


def _scores(result: Result, mode: str) -> str:
    """Return the mean over all tasks after the last of every metric beside the main one."""
    others = {name: scores for name, scores in result.scores.items() if name != result.measure}
    rows = {name: by_mode[mode][-1] for name, by_mode in others.items()}
    return "".join(f" {name} {number(_mean(row))}" for name, row in rows.items())


def _mean(row: Sequence[float | None]) -> float | None:
    values = [value for value in row if value is not None]
    return sum(values) / len(row) if len(values) == len(row) else None


def run(
    path: ConfigPath,
    settings: Settings = None,
    out: Annotated[
        Path | None,
        typer.Option(help="The run directory. Default: runs/CONFIG-METHOD-seedN.", metavar="DIR"),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume a stopped run.")] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Delete the run in the run directory first.")
    ] = False,
    engine: EngineKind = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Train the experiment of a config, and write a run directory."""
    quiet = quiet or as_json
    setup_logging(quiet)
    config = read_config(path, settings, engine)
    folder = out or default_folder(path, config)
    with (
        importing_from(path.parent),
        resumable(folder, _command(path, settings, folder, engine, quiet)),
    ):
        if config.model.weights_file:
            build_and_start(config)  # refuses unsuitable weights before anything is written
        with show_progress(config, quiet) as watch:
            result = run_config(config, out=folder, resume=resume, watch=watch, overwrite=overwrite)
    if as_json:
        print_json({"path": str(folder), **result.values})
    else:
        stdout_console().print(result_line(config, result), soft_wrap=True)


def default_folder(path: Path, config: Config) -> Path:
    """Return the run directory that is used if the command line names none."""
    method = re.sub(r"[^\w.-]+", "-", config.method["kind"])
    return Path("runs") / f"{path.stem}-{method}-seed{config.seed}"


def _command(
    path: Path, settings: list[str] | None, out: Path, engine: str | None, quiet: bool
) -> list[str]:
    """Return the command that resumes a run."""
    changes = repeat_option("--set", settings)
    chosen = ["--engine", engine] if engine is not None else []
    silent = ["--quiet"] if quiet else []
    return ["perdure", "run", str(path), *changes, "--out", str(out), *chosen, *silent, "--resume"]


def build_and_start(config: Config) -> Experiment:
    """Return the experiment of a config after creating its initial state; writes nothing."""
    experiment = build_experiment(config)
    experiment.initial_state()
    return experiment
