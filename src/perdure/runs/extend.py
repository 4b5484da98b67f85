"""Add tasks to a run, or go back to an earlier one; and a model that learns task after task."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from perdure.config import Config, load_saved
from perdure.config.load import read_data_spec
from perdure.config.root import read_extension
from perdure.core.errors import UserError, bad_value
from perdure.core.registry import give_again
from perdure.core.rng import Rng
from perdure.core.text import argument
from perdure.data.streams.build import make_stream, with_added_clients
from perdure.deploy.custom_code import check_trust, code_folder, save_custom_code
from perdure.deploy.model_files import load_model
from perdure.deploy.trained_model import TrainedModel
from perdure.runs.checkpoint import CheckpointFiles
from perdure.runs.directory import RunDirectory
from perdure.runs.given_data import giving_all
from perdure.runs.records import read_run
from perdure.runs.result import Result
from perdure.runs.writer import RunWriter, checkpoint_files, write_run_report
from perdure.training.events import EventCallback
from perdure.training.experiment import build_experiment

Data = Any
"""New data: a path (see `perdure.config.load`), a section like `data`, or data as
`perdure.run` takes it; or a list of sections or of data, one per task."""
Labels = Literal["shared", "separate"]
"""Whether classes of a known name are the known ones, or all classes of new data are new."""
Settings = dict[str, Any]
"""Values by dotted key, such as `{"train.lr": 0.05}`."""


def extend(
    run: str | Path,
    tasks: int | None = None,
    data: Data | None = None,
    labels: Labels = "shared",
    settings: Settings | None = None,
    watch: EventCallback | None = None,
    trust: bool = False,
    model: Any = None,
    given: Sequence[Any] = (),
) -> Result:
    """Add tasks to a run and train them.

    The run directory then holds one longer run: its matrices grow, and model/ and result.json are
    those of all tasks. If the process is killed, `perdure.resume(run)` continues.

    Args:
        run: The run directory.
        tasks: Number of further tasks of the run's stream.
        data: New data, instead of `tasks`: the path of a file or folder, a section like `data` of a
            config, or data as `perdure.run` takes it; or a list of sections or data, one per task.
        labels: Whether classes of new data that have a known name are the known ones ("shared"), or
            all of them are new ("separate").
        settings: Settings of the new tasks alone, such as `{"train.lr": 0.05}`.
        watch: As in `perdure.run`.
        trust: Whether code of the run may be executed; see `perdure.resume`.
        model: The nn.Module, if the run was made with one.
        given: Data given in Python with which the run was made or extended before.

    Returns:
        The result of all tasks.

    Raises:
        UserError: The tasks cannot be added, or the run is being trained. Nothing was changed.
        RunError: Training failed. Finished rounds are saved.

    Example:
        >>> perdure.extend("runs/demo", tasks=2)  # doctest: +SKIP

    """
    with (
        _opened(run, trust, model) as (directory, config),
        giving_all(given, config),
        giving_all(given_objects(data), config) as names,
    ):
        first = config.task_total + 1
        added = [{"source": n, "name": f"task {t}"} for t, n in enumerate(names, first)] or data
        longer = extended_config(_fixed(config), tasks, added, labels, settings)
        longer = with_added_clients(longer)
        return _change(directory, config, longer, watch)


def rewind(
    run: str | Path,
    task: int,
    trust: bool = False,
    model: Any = None,
    given: Sequence[Any] = (),
) -> Result:
    """Go back to the end of an earlier task: what came after it is deleted.

    The run is then one of `task` tasks. `perdure.extend` continues from there.

    Args:
        run: The run directory.
        task: The last task that stays, from 1. Its checkpoint must be kept (`runs.keep_tasks`).
        trust: Whether code of the run may be executed; see `perdure.resume`.
        model: The nn.Module, if the run was made with one.
        given: Data given in Python with which the run was made or extended.

    Returns:
        The result of the tasks that stay.

    Raises:
        UserError: The checkpoint is not there, or another process trains the run.

    """
    with _opened(run, trust, model) as (directory, config), giving_all(given, config):
        kept = kept_tasks(run)
        if task not in kept:
            known = ", ".join(map(str, kept)) or "none"
            raise bad_value(argument("task"), task, f"a task whose checkpoint is kept ({known})")
        return _change(directory, config, _cut(config, task), None)


def kept_tasks(run: str | Path) -> dict[int, int]:
    """Return the tasks to which a run can go back, from 1, and the bytes of their checkpoints."""
    files = CheckpointFiles(RunDirectory.open(run).checkpoints)
    return {task: path.stat().st_size for task, path in files.kept_tasks().items()}


@contextmanager
def _opened(run: str | Path, trust: bool, model: Any) -> Iterator[tuple[RunDirectory, Config]]:
    """Yield a run whose lock this process holds, and its config."""
    with RunDirectory.reopen(run) as directory:
        config = directory.config()
        if not config.engine.simulates:
            raise UserError(f"{run}: must be a run of engine auto, serial or vector, got flower")
        give_again(config.model.kind, model, exactly=True)
        check_trust(config, directory.path, trust, stream=True)
        yield directory, directory.config(code_folder(run))


def _change(
    directory: RunDirectory, before: Config, config: Config, watch: EventCallback | None
) -> Result:
    """Check and write another config of a run, and train what is missing."""
    experiment = build_experiment(config, directory.clients, code_folder(directory.path))
    initial = experiment.initial_state()
    checkpoint_files(directory, experiment).drop_after(before.task_total)
    directory.replace_config(config)
    save_custom_code(config, experiment.method, directory.path, code_folder(directory.path))
    return RunWriter(experiment, directory, watch).finish(initial)


# ---- configs


def extended_config(
    config: Config,
    tasks: int | None,
    data: Data | None,
    labels: str = "shared",
    settings: Settings | None = None,
) -> Config:
    """Return the config of a run with an extension; arguments as in `extend`."""
    stream = config.stream.model_copy(update={"tasks": config.stream.tasks + (tasks or 0)})
    extension = read_extension(
        {
            "tasks": tasks,
            "data": None if data is None else _sections(data),
            "labels": labels,
            "settings": settings or {},
            "added": datetime.now(UTC).isoformat(timespec="seconds"),
        }
    )
    return config.with_extensions(stream, [*config.extensions, extension])


def given_objects(data: Data) -> list[Any]:
    """Return the objects of new data that are given in Python; none for paths and sections."""
    every = data if isinstance(data, list) else [data]
    return [] if data is None or any(_is_named(each) for each in every) else every


def _is_named(data: Any) -> bool:
    is_section = isinstance(data, dict) and "source" in data
    return is_section or isinstance(data, str | Path)


def _sections(data: Data) -> list[dict[str, Any]]:
    if isinstance(data, str | Path):
        return read_data_spec(data)
    return [data] if isinstance(data, dict) else list(data)


def _cut(config: Config, task: int) -> Config:
    """Return the config of a run with its first tasks alone."""
    config = _fixed(config)
    kept, left = [], task - config.first_tasks
    for extension in config.extensions:
        if left > 0:
            kept.append(extension.cut(min(left, extension.count)))
        left -= extension.count
    of_stream = min(task, config.first_tasks) + sum(extension.tasks or 0 for extension in kept)
    return config.with_extensions(config.stream.model_copy(update={"tasks": of_stream}), kept)


def _fixed(config: Config) -> Config:
    """Return the config with what it leaves to all its tasks, so that other tasks do not change it.

    Images of domains keep the size that they have in the run.
    """
    if not config.stream.is_open or config.extensions:
        return config
    stream = make_stream(config, Rng(config.seed))
    data, shape = config.data, stream.shape
    if config.stream.unites_shapes and len(shape) == 3 and shape[1] == shape[2]:
        channels = shape[0] if shape[0] in (1, 3) else data.channels
        data = data.model_copy(update={"size": shape[1], "channels": channels})
    return config.model_copy(update={"stream": config.stream.fixed(stream), "data": data})


# ---- A model that learns task after task: a run directory, and the calls that are made on it


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
        write_run_report(read_run(self.run))
        return self.run / "report.html"

    def __repr__(self) -> str:
        tasks = load_saved(self.run / "config.yaml").task_total
        return f"Learner({str(self.run)!r}, {tasks} tasks)"
