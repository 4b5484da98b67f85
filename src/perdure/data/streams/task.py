"""A task, and sequences of tasks that are made when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, overload

import torch
from torch import Tensor

from perdure.data.joined_inputs import AnyInputs
from perdure.data.numbers import NumberScale, class_labels
from perdure.data.partition import Partition


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
    train: AnyInputs
    train_labels: Tensor
    """Labels of the training rows, int64; or standardized numbers, float32."""
    test: AnyInputs
    test_labels: Tensor
    """The same of the test rows."""
    partition: Partition
    groups: Sequence[EvalGroup]
    client_classes: ClientClasses | None = None
    validation: Sequence[EvalGroup] = ()
    """Rows of the training set that are held out to select settings on; see `data.validation`."""
    evaluates_on: EvaluationRows = "test"
    """What `test`, `test_labels` and `groups` hold: test rows, or validation rows."""
    origins: Tensor | None = None
    """int64 [training rows]: the task that each row comes from, in a cumulative stream. If None,
    all are of this task."""
    numbers: NumberScale | None = None
    """How numbers were standardized. If None, the task has classes."""
    test_clients: Tensor | None = None
    """int64 [test rows]: the client of each row. If None, the data does not say."""

    def classes_of(self, client: int) -> tuple[int, ...]:
        """Return the classes that a client has in this task; empty if it holds nothing."""
        if not self.partition.sizes[client]:
            return ()
        if self.client_classes is not None and self.origins is None:
            return self.client_classes(client)
        client_rows = self.partition.index(client).to(self.train_labels.device)
        return tuple(torch.unique(class_labels(self.train_labels[client_rows])).tolist())

    def on_validation(self) -> Task:
        """Return the task with its validation rows in the place of the test rows."""
        return replace(
            self, test=self.train, test_labels=self.train_labels, groups=self.validation,
            evaluates_on="validation", test_clients=None,
        )  # fmt: skip


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
