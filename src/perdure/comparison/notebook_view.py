"""The progress bar of a comparison in a notebook."""

from __future__ import annotations

from perdure.comparison.plan import PlannedRun
from perdure.comparison.processes import FailedRun, NoProgress, ProgressView
from perdure.core.notebook import NotebookBar, in_notebook
from perdure.runs.progress import RunProgress


def default_view() -> ProgressView:
    """Return the view of a comparison whose caller gives none: a bar in a notebook, or nothing."""
    return NotebookView() if in_notebook() else NoProgress()


class NotebookView:
    """A bar of all runs, with those that are running."""

    def __init__(self) -> None:
        self.bar = NotebookBar("runs")
        self.runs = self.done = self.failed = 0
        self.running: dict[str, RunProgress] = {}

    def begin(self, runs: int, finished: int) -> None:
        """Show the number of all runs and of those that finished before."""
        self.runs, self.done = runs, finished
        self._show()

    def update(self, run: PlannedRun, progress: RunProgress) -> None:
        """Show the progress of a running run."""
        self.running[run.name] = progress
        self._show()

    def end(self, run: PlannedRun, progress: RunProgress, failure: FailedRun | None) -> None:
        """Count a run that ended."""
        self.running.pop(run.name, None)
        self.done += 1
        self.failed += failure is not None
        self._show()

    def _show(self) -> None:
        rounds = (
            f"{name} round {p.rounds} of {p.total_rounds}" for name, p in self.running.items()
        )
        failed = [f"{self.failed} failed"] if self.failed else []
        self.bar.show(self.done, self.runs, "; ".join([*failed, *rounds]))
