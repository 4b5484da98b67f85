"""Run a comparison: plan the runs, execute them, and write the table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perdure.config import read_yaml
from perdure.core.errors import UserError, bad_value
from perdure.core.files import write_atomic
from perdure.core.notebook import NotebookBar, html_table, in_notebook
from perdure.core.text import argument
from perdure.core.version import __version__
from perdure.recipes import find_config
from perdure.report.comparison import Comparison, compare_groups
from perdure.report.matplotlib_charts import figures
from perdure.report.records import RunRecord, Selection, select_settings
from perdure.report.table_writers import OWN_NAMES, comparison_html, table_files
from perdure.report.tables import TableStyle, check_metrics
from perdure.runs.compare.common_settings import (
    EngineChoice,
    choose_engine,
    recorded_choice,
    with_common_settings,
    with_engine_choice,
    with_existing_engines,
)
from perdure.runs.compare.plan import PlannedRun, check_plan, plan, plan_references
from perdure.runs.compare.processes import (
    CpuBudget,
    FailedRun,
    NoProgress,
    ProgressView,
    WorkerInputs,
    run_all,
    try_engine,
)
from perdure.runs.compare.variants import MethodChoice, Sweep, read_methods
from perdure.runs.given_data import shared_data
from perdure.runs.progress import RunProgress
from perdure.runs.records import read_run, read_runs

if TYPE_CHECKING:
    from perdure.report.matplotlib_charts import Drawings


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


# ---- Run a comparison: plan the runs, execute them, and write the table


@dataclass(frozen=True, repr=False)
class Outcome:
    """The result of a comparison. A notebook shows its tables."""

    out: Path
    """Directory of the comparison."""
    comparison: Comparison | None
    """The table; None if no run has finished."""
    failures: tuple[FailedRun, ...]
    """Runs that failed."""
    selection: Selection | None = None
    """The settings that were selected; None if all are shown."""
    style: TableStyle = field(default_factory=TableStyle)
    """Which metrics the tables show, and in which unit."""

    def to_frame(self) -> Any:
        """Return the table as a pandas DataFrame; see `Comparison.to_frame`.

        Raises:
            UserError: No run has finished, or pandas is not installed.

        """
        if self.comparison is None:
            raise UserError(f"{self.out}: no run has finished")
        return self.comparison.to_frame()

    def figures(self, out: str | Path | None = None, formats: Sequence[str] = ("png",)) -> Drawings:
        """Draw the figures of the finished runs; see `perdure.report.figures`."""
        return figures(read_runs([self.out]), out, formats)

    def __repr__(self) -> str:
        failed = f"{len(self.failures)} failed, " if self.failures else ""
        return f"Outcome({failed}{self.out}, {self.comparison!r})"

    def _repr_html_(self) -> str:
        failed = [[each.run.name, each.reason] for each in self.failures]
        failures = html_table("failed", ["run", "reason"], failed) if failed else ""
        if self.comparison is None:
            return failures
        return failures + comparison_html(self.comparison, self.style)


def compare(
    config: dict[str, Any] | str | Path,
    methods: str | Sequence[MethodChoice],
    seeds: Sequence[int] = (0, 1, 2),
    *,
    out: str | Path,
    sweeps: Sequence[Sweep] = (),
    references: str = "closed-form",
    select: str | None = None,
    jobs: int | None = None,
    view: ProgressView | None = None,
    data: Any = None,
    metrics: Sequence[str] = (),
    percent: bool = False,
) -> Outcome:
    """Run every method with every seed, in parallel processes, and compare them.

    Finished runs in `out` are not repeated, and interrupted ones are resumed.

    Args:
        config: A nested dict, or the path of a YAML file.
        methods: Text such as `fedavg,fot:threshold=0.9`, or choices. The first is the reference.
        seeds: Seeds of the runs of each method.
        out: Directory of the comparison.
        sweeps: Keys of the config and the values that they take, in all combinations.
        references: References to add: `closed-form` (heads in closed form, cheap), `all` (also
            joint training, one model per task and bodies frozen after task 1) or `none`.
        select: `validation` shows of each method the setting with the best mean accuracy on
            validation rows (`data.validation`). If None, all settings are shown.
        jobs: Number of parallel runs. Default: one per core.
        view: Receives the progress. If None, a notebook shows a bar, and nothing is shown
            elsewhere.
        data: Data that is given in Python, as in `perdure.run`.
        metrics: Names of the metrics and costs that tables show, such as ["ACC", "FGT"]. If empty,
            every table has a default; table.csv and comparison.json always have all.
        percent: Whether tables show shares as percentages.

    Raises:
        UserError: The config, a method or `out` is invalid. Nothing was run.

    Example:
        >>> config = {"stream": {"tasks": 2}, "train": {"rounds": 1}}
        >>> outcome = compare(config, "fedavg,fot", [0, 1], out="runs/first")  # doctest: +SKIP
        >>> outcome.comparison.labels  # doctest: +SKIP
        ['fedavg', 'fot']

    """
    path = Path(config) if isinstance(config, str | Path) else None
    values = read_yaml(find_config(path)) if path is not None else config
    assert isinstance(values, dict)
    chosen = read_methods(methods) if isinstance(methods, str) else tuple(methods)
    method_dir = path.parent if path is not None else None
    with shared_data(values, data, method_dir) as (named, data_file):
        planned = plan(named, chosen, seeds, sweeps, method_dir)
        planned += plan_references(named, references, planned, method_dir)
        style = TableStyle(tuple(metrics), percent)
        return run_plan(planned, Path(out), jobs, view, method_dir, select, style, data_file)


def run_plan(
    planned: Sequence[PlannedRun],
    out: Path,
    jobs: int | None = None,
    view: ProgressView | None = None,
    method_dir: Path | None = None,
    select: str | None = None,
    style: TableStyle | None = None,
    data_file: Path | None = None,
) -> Outcome:
    """Run a plan, and compare the finished runs.

    Runs whose configs leave the engine or its chunk open all use the same (comparison.engines), and
    so do runs that leave the head, the weights or the outputs in the loss open
    (comparison.common_settings).
    """
    style = style or TableStyle()
    check_selection(planned, select)
    check_metrics(style.metrics, {m for run in planned for m in run.config.evaluate.metrics or ()})
    if out.exists() and not out.is_dir():
        raise UserError(f"{argument('out', out)}: must be a directory, got a file")
    known, planned = recorded_choice(planned, out), with_existing_engines(planned, out)
    planned = with_common_settings(planned, out, method_dir)
    check_plan(planned, out, method_dir)
    cores = CpuBudget.divide(jobs, len(planned))
    folders = (str(method_dir.resolve()),) if method_dir is not None else ()
    inputs = WorkerInputs(folders, data_file)
    choice = choose_engine(planned, out, known, lambda run: try_engine(run, cores.threads, inputs))
    planned = with_engine_choice(planned, out, choice)
    _write(out, planned, cores, choice)  # so that `perdure watch` knows all runs
    failures = run_all(planned, out, cores, view or default_view(), inputs)
    return _conclude(planned, out, cores, choice, tuple(failures), select, style)


def check_selection(planned: Sequence[PlannedRun], select: str | None) -> None:
    """Refuse to select on anything but validation rows, or without these."""
    if select is None:
        return
    if select != "validation":
        expected = "validation, since test rows are never selected on"
        raise bad_value(argument("select"), select, expected)
    without = next((run for run in planned if not run.config.data.validation), None)
    if without is not None:
        expected = f"above 0 with {argument('select', 'validation')}, such as 0.1"
        raise bad_value("data.validation", without.config.data.validation, expected)


def finished_groups(planned: Sequence[PlannedRun], out: Path) -> dict[str, list[RunRecord]]:
    """Return the finished runs of a plan by label, in the order of the plan."""
    groups: dict[str, list[RunRecord]] = {}
    for run in planned:
        if run.is_finished(out):
            groups.setdefault(run.label, []).append(read_run(run.path(out)))
    order = dict.fromkeys(run.label for run in planned)
    return {label: groups[label] for label in order if label in groups}


def _conclude(
    planned: Sequence[PlannedRun],
    out: Path,
    cores: CpuBudget,
    choice: EngineChoice,
    failures: tuple[FailedRun, ...],
    select: str | None,
    style: TableStyle,
) -> Outcome:
    groups, selection = finished_groups(planned, out), None
    if select is not None:
        selection = select_settings({r.label: r.method or r.label for r in planned}, groups)
        groups = {name: group for name, group in groups.items() if name not in selection.rejected}
    notes = selection.notes if selection else ()
    comparison = compare_groups(groups, notes=notes) if groups else None
    _write(out, planned, cores, choice, failures, comparison, selection)
    if comparison is not None:
        _write_tables(out, comparison, style)
    return Outcome(out, comparison, failures, selection, style)


def _write_tables(out: Path, comparison: Comparison, style: TableStyle) -> None:
    files = table_files(comparison, style)
    for name, text in files.items():
        write_atomic(out / name, text.encode())
    for name in set(OWN_NAMES) - set(files):  # of a table that is no longer shown
        (out / name).unlink(missing_ok=True)


def _write(
    out: Path,
    planned: Sequence[PlannedRun],
    cores: CpuBudget,
    choice: EngineChoice,
    failures: Sequence[FailedRun] = (),
    comparison: Comparison | None = None,
    selection: Selection | None = None,
) -> None:
    """Write comparison.json: the runs and, once they have ended, the table."""
    summary = {
        "perdure": __version__,
        "runs": [{"label": run.label, "seed": run.seed, "path": run.name} for run in planned],
        "failed": [{"run": failure.run.name, "reason": failure.reason} for failure in failures],
        "jobs": cores.jobs,
        "threads": cores.threads,
        "engine": choice.to_dict(),
        "selection": selection.to_dict() if selection else None,
        "table": comparison.to_dict() if comparison else None,
    }
    out.mkdir(parents=True, exist_ok=True)
    write_atomic(out / "comparison.json", (json.dumps(summary, indent=2) + "\n").encode())
