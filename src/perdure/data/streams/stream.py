"""A stream of tasks, each divided among the clients, and the sources its tasks are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, overload

import numpy as np
import torch
from torch import Tensor

from perdure.config import Config
from perdure.core.errors import bad_value
from perdure.core.rng import Rng
from perdure.data.examples import AnyExamples, Array, Examples, NumberScale, Source
from perdure.data.labels import class_labels
from perdure.data.partition import LargePartition, Partition, make_partition, presence

# ---- A task, and sequences of tasks that are made when they are asked for


@dataclass(frozen=True)
class EvalGroup:
    """Test rows that are judged together, among the same classes."""

    index: Tensor
    """int64: rows of the task's test set."""
    classes: tuple[int, ...]
    weight: float = 1.0


EvaluationRows = Literal["test", "validation"]
"""The rows on which a model is evaluated."""


class ClientClasses(Protocol):
    """The classes that a client works on in a task, where clients choose for themselves."""

    def __call__(self, client: int) -> tuple[int, ...]:
        """Classes of a client."""
        ...


@dataclass(frozen=True)
class Task:
    """One task: which rows it is made of, who holds them, and what it is tested on."""

    index: int
    name: str
    classes: tuple[int, ...]
    """The labels that occur, in the label space of the stream."""
    train: AnyExamples
    """Training rows, with labels (int64) or standardized numbers (float32)."""
    test: AnyExamples
    """Test rows, or validation rows, with the same."""
    partition: Partition
    groups: Sequence[EvalGroup]
    client_classes: ClientClasses | None = None
    validation: Sequence[EvalGroup] = ()
    """Rows of the training set that are held out to select settings on; see `data.validation`."""
    evaluates_on: EvaluationRows = "test"
    """What `test` and `groups` hold: test rows, or validation rows."""
    numbers: NumberScale | None = None
    """How numbers were standardized. If None, the task has classes."""

    @property
    def test_clients(self) -> Tensor | None:
        """The client of each test row, int64 [rows]; None if the data does not say."""
        return self.test.clients if self.evaluates_on == "test" else None

    def classes_of(self, client: int) -> tuple[int, ...]:
        """Return the classes that a client has in this task; empty if it holds nothing."""
        if not self.partition.sizes[client]:
            return ()
        if self.client_classes is not None and self.train.origins is None:
            return self.client_classes(client)
        labels = self.train.y
        client_rows = self.partition.index(client).to(labels.device)
        return tuple(torch.unique(class_labels(labels[client_rows])).tolist())

    def on_validation(self) -> Task:
        """Return the task with its validation rows in the place of the test rows."""
        return replace(self, test=self.train, groups=self.validation, evaluates_on="validation")


@dataclass(frozen=True)
class LazyTasks(Sequence[Task]):
    """Tasks that are made when they are asked for."""

    length: int
    make: Callable[[int], Task]

    def __len__(self) -> int:
        return self.length

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Task]: ...
    def __getitem__(self, index: int | slice) -> Task | Sequence[Task]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(self.length))]
        if not 0 <= index < self.length:
            raise IndexError(index)
        return self.make(index)


@dataclass(frozen=True)
class AskedTasks(LazyTasks):
    """Tasks that a custom function is asked for, each once; nobody knows the next one."""

    made: dict[int, Task] = field(default_factory=dict)

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Task]: ...
    def __getitem__(self, index: int | slice) -> Task | Sequence[Task]:
        if isinstance(index, int) and index not in self.made:
            self.made[index] = super().__getitem__(index)
        return self.made[index] if isinstance(index, int) else super().__getitem__(index)


def map_tasks(tasks: Sequence[Task], change: Callable[[Task], Task]) -> Sequence[Task]:
    """Return changed tasks; those that are made when they are asked for stay so."""
    if isinstance(tasks, LazyTasks):
        return type(tasks)(len(tasks), lambda index: change(tasks[index]))
    return [change(task) for task in tasks]


@dataclass(frozen=True)
class TaskClasses(Sequence[tuple[int, ...]]):
    """The classes of tasks that are made when they are asked for."""

    tasks: AskedTasks

    def __len__(self) -> int:
        return len(self.tasks)

    @overload
    def __getitem__(self, index: int) -> tuple[int, ...]: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[tuple[int, ...], ...]: ...
    def __getitem__(self, index: int | slice) -> tuple[int, ...] | tuple[tuple[int, ...], ...]:
        if isinstance(index, slice):
            return tuple(task.classes for task in self.tasks[index])
        return self.tasks[index].classes


# ---- A stream of tasks, and the sources that its tasks are made of

__all__ = [
    "EvalGroup",
    "EvaluationRows",
    "LazyTasks",
    "Stream",
    "Task",
    "divide_task",
    "label_array",
    "make_task",
    "map_tasks",
    "unique_labels",
]


@dataclass(frozen=True)
class Stream:
    """The tasks in their order, over one label space and one shape of input."""

    kind: str
    tasks: Sequence[Task]
    class_names: tuple[str, ...]
    shape: tuple[int, ...]
    agreed: tuple[tuple[int, ...], ...] | None = None
    """The classes of each task where they are known before the tasks are there."""
    feature_names: tuple[str, ...] | None = None
    """The columns of a table that are the features of an input."""
    client_names: tuple[str, ...] | None = None
    """The clients. If None, the data does not name them."""
    known_classes: tuple[int, ...] | None = None
    """Number of classes that are known in each task. If None, all are known from the start."""
    data_hashes: dict[int, str] | None = None
    """SHA-256 of the data that a function gave, by task. If None, no function is asked."""

    def check_data(self, recorded: dict[str, str]) -> None:
        """Ask for the data of earlier tasks again, and refuse another one.

        Raises:
            UserError: The data of a task has changed.

        """
        for task, expected in recorded.items():
            name = self.tasks[int(task)].name
            got = (self.data_hashes or {}).get(int(task))
            if got != expected:
                raise bad_value(f"data of {name}", got, f"that of the run, sha256 {expected!r}")

    @classmethod
    def of(
        cls, kind: str, tasks: Sequence[Task], source: Source, names: tuple[str, ...] | None = None
    ) -> Stream:
        """Return the stream of tasks that were made from a source, or from several like it."""
        return cls(
            kind, tasks, names or source.class_names, source.shape,
            feature_names=source.feature_names, client_names=source.client_names,
        )  # fmt: skip

    @property
    def classes(self) -> int:
        """Size of the label space."""
        return len(self.class_names)

    @property
    def task_classes(self) -> Sequence[tuple[int, ...]]:
        """The classes of each task."""
        if isinstance(self.tasks, AskedTasks):
            return TaskClasses(self.tasks)
        return self.agreed or tuple(task.classes for task in self.tasks)

    @property
    def known_tasks(self) -> int:
        """Number of tasks that are known before training: all, or the first of those asked for."""
        return 1 if isinstance(self.tasks, AskedTasks) else len(self.tasks)

    def with_min_rows(self, min_rows: int) -> Stream:
        """Return the stream in which clients with fewer rows of a task hold nothing of it."""
        if min_rows <= 1:
            return self

        def large(task: Task) -> Task:
            return replace(task, partition=LargePartition(task.partition, min_rows))

        return replace(self, tasks=map_tasks(self.tasks, large))

    def to(self, device: torch.device | str) -> Stream:
        """Return the stream on a device; rows that tasks share stay shared."""
        moved = _Moved(device)
        return replace(self, tasks=map_tasks(self.tasks, moved.task))


class _Moved:
    """Tensors on a device, each moved once however many tasks use it."""

    def __init__(self, device: torch.device | str) -> None:
        self._device = device
        self._known: dict[int, Tensor] = {}

    def tensor(self, tensor: Tensor) -> Tensor:
        return self._known.setdefault(id(tensor), tensor.to(self._device))

    def examples(self, part: Examples) -> Examples:
        order = None if part.permutation is None else self.tensor(part.permutation)
        normalization = part.normalization
        if normalization is not None:
            scale, shift = map(self.tensor, (normalization.scale, normalization.shift))
            normalization = replace(normalization, scale=scale, shift=shift)
        x, y = self.tensor(part.x), self.tensor(part.y)
        return replace(part, x=x, y=y, normalization=normalization, permutation=order)

    def task(self, task: Task) -> Task:
        train, test = task.train.map(self.examples), task.test.map(self.examples)
        return replace(task, train=train, test=test)


def make_task(
    source: Source, number: int, name: str, classes: tuple[int, ...], partition: Partition
) -> Task:
    """Return a task of a normalized source, tested on all test rows of its classes as one group."""
    labels = class_labels(source.test.y)
    is_tested = torch.isin(labels, torch.tensor(classes, dtype=torch.int64))
    group = EvalGroup(is_tested.nonzero().flatten(), classes)
    return Task(
        number, name, classes, source.train, source.test, partition, (group,),
        numbers=source.numbers,
    )  # fmt: skip


def label_array(examples: Examples) -> Array:
    """Return labels as an array; numbers have the label 0."""
    labels: Array = class_labels(examples.y).numpy()
    return labels


def divide_task(
    config: Config,
    source: Source,
    number: int,
    name: str,
    rng: Rng,
    classes: tuple[int, ...] | None = None,
) -> Task:
    """Return a task over a normalized source, divided among the clients that see it."""
    labels = label_array(source.train)
    classes = unique_labels(labels) if classes is None else classes
    rows = np.flatnonzero(np.isin(labels, classes))
    partition = make_partition(
        labels[rows],
        rows,
        config.clients.count,
        config.clients.partition,
        rng.numpy_generator("partition", number),
        presence(config, number, rng),
        None if source.train.clients is None else source.train.clients.numpy()[rows],
    )
    return make_task(source, number, name, classes, partition)


def unique_labels(labels: Array) -> tuple[int, ...]:
    """Return the labels that occur, sorted."""
    return tuple(int(label) for label in np.unique(labels))
