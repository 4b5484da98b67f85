"""The progress bar of a run in a notebook."""

from __future__ import annotations

from perdure.config import Config
from perdure.core.event_log import Event
from perdure.core.notebook import NotebookBar, in_notebook
from perdure.runs.progress import accuracies_so_far, expected_tasks
from perdure.training.events import EventCallback
from perdure.training.state import RunState


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
