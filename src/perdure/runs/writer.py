"""Train an experiment to its end and write its run directory, checkpoint by checkpoint."""

from __future__ import annotations

import contextlib
import logging

import torch

from perdure.config import RUN_FORMAT, Config, check_run_format
from perdure.core.event_log import Event
from perdure.core.notebook import NotebookBar, in_notebook
from perdure.core.trees import Tree, to_device
from perdure.deploy.model_files import export_model
from perdure.report.page import write_page
from perdure.report.records import RunRecord, Runs
from perdure.runs import checkpoint
from perdure.runs.checkpoint import CheckpointFiles
from perdure.runs.directory import RunDirectory
from perdure.runs.progress import accuracies_so_far, expected_tasks
from perdure.runs.result import Result, result_values
from perdure.runs.tracking import Tracking, open_tracking
from perdure.training.events import EventCallback
from perdure.training.experiment import Experiment
from perdure.training.loop import run_stream
from perdure.training.state import RunState

# ---- The progress bar of a run in a notebook


def notebook_watch(config: Config) -> EventCallback | None:
    """Return a function that shows the progress of a run; None outside notebooks."""
    return RunBar(config) if in_notebook() else None


class RunBar:
    """A bar of all rounds, with the accuracy so far."""

    def __init__(self, config: Config) -> None:
        self.config, self.tasks = config, expected_tasks(config)
        self.bar = NotebookBar(f"{config.method['kind']}, rounds")
        self.accuracy = ""

    def __call__(self, state: RunState, event: Event) -> None:
        """Show the progress after a round or a task."""
        if event["event"] == "task":
            mode, values = accuracies_so_far(event)
            self.accuracy = f", {mode} accuracy {sum(values) / len(values):.3f}"
            self.tasks = len(event["accuracy"]["task_agnostic"])
        self.during(state, event)

    def during(self, state: RunState, event: Event) -> None:
        """Show the progress as uploads arrive within a round."""
        total = self.config.total_rounds(self.tasks) if self.tasks is not None else None
        note = f"(task {event['task'] + 1} of {self.tasks or '?'}{self.accuracy})"
        self.bar.show(state.counters.rounds, total, note)


# ---- Train an experiment to its end and write its run directory, checkpoint by checkpoint

log = logging.getLogger(__name__)


class RunWriter:
    """Trains an experiment and writes its run directory."""

    def __init__(
        self, experiment: Experiment, directory: RunDirectory | None, watch: EventCallback | None
    ) -> None:
        self.experiment, self.directory = experiment, directory
        self.watch = watch if watch is not None else notebook_watch(experiment.config)
        self.tracking = Tracking([])
        if directory is not None:
            self.files = checkpoint_files(directory, experiment)
            experiment.privacy.store_in(directory.path)

    def finish(self, initial: RunState) -> Result:
        """Train from the last valid checkpoint, or from `initial`, to the end."""
        state = self._restore() or initial
        during = getattr(self.watch, "during", None)
        with contextlib.ExitStack() as opened:
            if self.directory is not None:
                config, events = self.experiment.config, self.directory.events()
                trackers = open_tracking(config, self.directory.path, events)
                self.tracking = opened.enter_context(trackers)
            state = run_stream(self.experiment, state, self._after, during)
        values = result_values(self.experiment, state)
        if self.directory is not None:
            export_model(self.directory.model, self.experiment, state)
            content = self.directory.save_result(values)
            if self.experiment.config.runs.report:
                write_run_report(RunRecord(self.directory.path, self.experiment.config, content))
        return Result(values, self.directory.path if self.directory else None)

    def _restore(self) -> RunState | None:
        """Return the state of the last valid checkpoint, or None if there is none."""
        if self.directory is None:
            return None
        self.files.drop_after(self.experiment.task_count)
        folders = (self.files.folder, self.files.tasks)  # of rounds, or else of tasks
        valid = (checkpoint.latest(folder, self._check_client_states) for folder in folders)
        found = next((newest for newest in valid if newest is not None), None)
        if found is None:
            self.directory.truncate_events(0)
            return None
        path, tree = found
        check_run_format(path, tree.get("format"))
        self.experiment.stream.check_data(tree["data_hashes"] or {})
        self.directory.truncate_events(tree["events_size"])
        self.files.clean(path, tree)
        tree = to_device(tree, self.experiment.device)
        self.experiment.store.restore(tree["clients"])
        self.experiment.store.sweep(self.files.manifests())  # a killed process may not have
        self.experiment.engine.restore(tree["engine"])
        state = RunState.from_tree(tree["state"], self.experiment.method)
        state.fit_rows(self.experiment.task_count)
        if state.task < self.experiment.task_count:
            log.info("resuming at task %d, round %d", state.task + 1, state.round + 1)
            _warn_of_threads(tree["threads"])
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
            if event["event"] == "task" and state.task < self.experiment.task_count:
                export_model(self.directory.model, self.experiment, state)
        self.tracking.log(event)
        if self.watch is not None:
            self.watch(state, event)

    def _save_checkpoint(self, directory: RunDirectory, state: RunState) -> None:
        """Write the client states, then the checkpoint that refers to them; then clean up."""
        store = self.experiment.store
        manifest = store.commit()
        tree = {
            "format": RUN_FORMAT,
            "state": state.to_tree(),
            "clients": manifest,
            "engine": self.experiment.engine.choice(),
            "events_size": directory.events_size(),
            "threads": torch.get_num_threads(),
            "data_hashes": self.experiment.stream.data_hashes,
        }
        self.files.save(state.checkpoint_number, tree)
        others = self.files.manifests()
        if manifest or others:
            store.sweep(others)


def write_run_report(record: RunRecord) -> None:
    """Write report.html into the directory of a finished run; a failure is only logged."""
    try:
        write_page(Runs((record,)), record.path / "report.html")
    except Exception as error:
        log.warning("%s: report.html was not written: %s", record.path, error)


def checkpoint_files(directory: RunDirectory, experiment: Experiment) -> CheckpointFiles:
    """Return the checkpoints of a run, of which as many are kept as its config says."""
    runs = experiment.config.runs
    return CheckpointFiles(directory.checkpoints, runs.keep_checkpoints, runs.keep_tasks)


def _warn_of_threads(before: int) -> None:
    """Warn if the number of threads changed, which changes the order of sums."""
    now = torch.get_num_threads()
    if before != now:
        log.warning(
            "the run started with %d threads and continues with %d: its last digits may differ "
            "from those of a run without a stop (OMP_NUM_THREADS=%d avoids that)",
            before, now, before,
        )  # fmt: skip
