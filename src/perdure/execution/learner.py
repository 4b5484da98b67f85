"""A model that learns task after task: a run directory, and the calls that are made on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from perdure.config import load_saved
from perdure.core.errors import UserError
from perdure.execution.extension import Data, Labels, Settings, extend, given_objects
from perdure.execution.result import Result
from perdure.execution.run_writer import write_run_report
from perdure.runs.directory import RunDirectory
from perdure.runs.model_files import load_model
from perdure.runs.trained_model import TrainedModel
from perdure.training.events import EventCallback


class Learner:
    """Learns task after task, in a run directory.

    Args:
        run: The run directory, or the result of a run that has one.
        data: The data, if the run was made with data given in Python.
        trust: Whether code of the run may be executed; see `perdure.resume`.
        model: The nn.Module, if the run was made with one.

    Example:
        >>> learner = perdure.Learner("runs/demo")  # doctest: +SKIP
        >>> learner.learn((images, labels), rounds=5)  # doctest: +SKIP
        >>> learner.predict(new_images)  # doctest: +SKIP
    """

    def __init__(
        self, run: str | Path | Result, data: Any = None, trust: bool = False, model: Any = None
    ) -> None:
        path = run.path if isinstance(run, Result) else Path(run)
        if path is None:
            raise UserError("run: must be a run directory, got a result that was not written (out)")
        self.run = RunDirectory.open(path).path
        self._given = [] if data is None else [data]
        self._trust, self._model = trust, model
        self._loaded: tuple[bytes, TrainedModel] | None = None

    def learn(
        self,
        data: Data,
        rounds: int | None = None,
        labels: Labels = "shared",
        settings: Settings | None = None,
        watch: EventCallback | None = None,
    ) -> Result:
        """Learn new data as the next task; see `perdure.extend`.

        Args:
            data: The data.
            rounds: Number of training rounds. If None, as the run's config has it.
            labels: Whether classes of a known name are the known ones, or all are new.
            settings: Settings of this task alone.
            watch: As in `perdure.run`.
        """
        chosen = {**({} if rounds is None else {"train.rounds": rounds}), **(settings or {})}
        result = extend(
            self.run, data=data, labels=labels, settings=chosen, watch=watch, trust=self._trust,
            model=self._model, given=self._given,
        )  # fmt: skip
        self._given += given_objects(data)
        return result

    @property
    def result(self) -> Result:
        """The result of all tasks so far."""
        return Result(RunDirectory.open(self.run).load_result(), self.run)

    def evaluate(self) -> dict[str, list[float] | None]:
        """Return the accuracy on each task so far by inference mode, after the last task."""
        rows = {mode: rows and rows[-1] for mode, rows in self.result.matrix.items()}
        return rows

    @property
    def model(self) -> TrainedModel:
        """The trained model after the last task."""
        card = (self.run / "model/card.json").read_bytes()
        if self._loaded is None or self._loaded[0] != card:
            self._loaded = card, load_model(self.run, self._trust, self._model)
        return self._loaded[1]

    def predict(self, x: Any, **options: Any) -> Any:
        """Predict the class of every example; arguments as in `TrainedModel.predict`."""
        return self.model.predict(x, **options)

    def report(self) -> Path:
        """Write report.html into the run directory and return its path."""
        write_run_report(self.run)
        return self.run / "report.html"

    def __repr__(self) -> str:
        tasks = load_saved(self.run / "config.yaml").task_total
        return f"Learner({str(self.run)!r}, {tasks} tasks)"
