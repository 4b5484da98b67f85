"""A network: a body, and a head whose outputs stand for classes and tasks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Literal

import torch
from torch import Tensor

from perdure.config.model import ModelConfig
from perdure.core.rng import Rng
from perdure.core.trees import Tensors
from perdure.models import ops
from perdure.models.layers import Body, BodySetup, Layer, linear_layer
from perdure.models.ops import ForwardPass

# ---- The assignment of a network's outputs to classes and tasks


@dataclass(frozen=True)
class Outputs:
    """The outputs of a network, as tasks arrive.

    A shared head has one output per class that is known; where a task brings classes that nobody
    knew, they follow the others. A growing head gets one block of outputs per task: one output for
    each of the task's classes, after those of earlier tasks.

    Example:
        >>> outputs = Outputs("growing", 4, ((0, 1), (2, 3)))
        >>> outputs.task_mask(1, newest=1)
        tensor([False, False,  True,  True])
    """

    kind: Literal["shared", "growing"]
    """Kind of the head."""
    classes: int
    """Number of classes in total."""
    task_classes: Sequence[tuple[int, ...]]
    """Labels of each task."""
    known_classes: tuple[int, ...] | None = None
    """Number of classes that are known in each task. If None, all are known from the start."""
    is_number: bool = False
    """Whether the one output is a number to predict, not the score of a class."""

    def known(self, task: int) -> int:
        """Return the number of classes that are known while `task` is the newest."""
        return self.classes if self.known_classes is None else self.known_classes[task]

    def count(self, task: int) -> int:
        """Return the number of outputs while `task` is the newest."""
        if self.kind == "shared":
            return self.known(task)
        return sum(len(labels) for labels in self.task_classes[: task + 1])

    def added(self, task: int) -> int:
        """Return the number of outputs that a task adds to those before it."""
        return self.count(task) - (self.count(task - 1) if task else 0)

    def until(self, task: int) -> Outputs:
        """Return the outputs as they are while `task` is the newest."""
        known = None if self.known_classes is None else self.known_classes[: task + 1]
        classes = tuple(self.task_classes[: task + 1])
        return replace(self, classes=self.known(task), task_classes=classes, known_classes=known)

    @property
    def same_for_all_tasks(self) -> bool:
        """Whether every task has the same outputs, so that knowing the task restricts nothing.

        False if the classes of later tasks are not known yet. A single task has the same outputs as
        those that may follow if it has all classes.
        """
        if self.kind != "shared" or not isinstance(self.task_classes, tuple):
            return False
        groups = {frozenset(classes) for classes in self.task_classes}
        if len(self.task_classes) == 1:
            groups.add(frozenset(range(self.classes)))
        return len(groups) <= 1

    def first_output(self, task: int) -> int:
        """Return the index of the first output in a task's block of a growing head."""
        return sum(len(labels) for labels in self.task_classes[:task])

    def output_labels(self, task: int) -> Tensor:
        """Return the label of each output while `task` is the newest, int64 [outputs]."""
        if self.kind == "shared":
            return torch.arange(self.known(task))
        labels = chain.from_iterable(self.task_classes[: task + 1])
        return torch.tensor(list(labels), dtype=torch.int64)

    def targets(self, task: int) -> Tensor:
        """Return the output of each label, int64 [classes]; -1 for labels of other tasks."""
        labels = torch.tensor(self.task_classes[task], dtype=torch.int64)
        result = torch.full((self.classes,), -1, dtype=torch.int64)
        first = 0 if self.kind == "shared" else self.first_output(task)
        result[labels] = labels if self.kind == "shared" else first + torch.arange(len(labels))
        return result

    def task_mask(self, task: int, newest: int, classes: Sequence[int] | None = None) -> Tensor:
        """Return the mask of a task's outputs, bool [outputs]."""
        indices = self.targets(task)
        if classes is not None:
            indices = indices[torch.tensor(list(classes), dtype=torch.int64)]
        mask = torch.zeros(self.count(newest), dtype=torch.bool)
        mask[indices[indices >= 0]] = True
        return mask

    def seen_mask(self, newest: int) -> Tensor:
        """Return the mask of the outputs of all tasks so far, bool [outputs]."""
        mask = torch.zeros(self.count(newest), dtype=torch.bool)
        for task in range(newest + 1):
            mask |= self.task_mask(task, newest)
        return mask


# ---- A network: a body, and a head with one output per class or one block of outputs per task


@dataclass(frozen=True)
class Network:
    """A model as a pure function of named parameters: body -> features, head -> logits."""

    body: Body
    """The network without its head."""
    outputs: Outputs
    """Outputs of the head, and their classes."""
    bias: bool = True
    """Whether the head has a bias."""
    feature_size: int = field(init=False, repr=False)
    """Values per row that the head gets."""
    layers: tuple[Layer, ...] = field(init=False, repr=False)
    """Every weight matrix of the body, in the order of the forward pass."""

    def __post_init__(self) -> None:
        """Take the facts of the body that methods read."""
        object.__setattr__(self, "feature_size", self.body.feature_size)
        object.__setattr__(self, "layers", self.body.layers)

    @cached_property
    def head_layers(self) -> tuple[Layer, ...]:
        """The blocks of the head; a shared head has one, and one for each addition of classes."""
        blocks = (self._head(task) for task in range(len(self.outputs.task_classes)))
        return tuple(block for block in blocks if block.outputs)

    def _head(self, task: int) -> Layer:
        """Return the block of outputs that a task adds."""
        first_of_shared = self.outputs.kind == "shared" and task == 0
        name = "head" if first_of_shared else f"head.{task}"
        return linear_layer(name, self.feature_size, self.outputs.added(task), self.bias)

    def with_body(self, body: Body) -> Network:
        """Return the network with another body or a changed one."""
        return self if body is self.body else replace(self, body=body)

    def to(self, device: torch.device) -> Network:
        """Return a copy with its constants on a device."""
        return self.with_body(self.body.to(device))

    def init(self, generator: torch.Generator) -> tuple[Tensors, Tensors]:
        """Return the initial parameters and buffers, with the head of the first task.

        A module's own head is the first one if it has the same shape.
        """
        params, buffers = self.body.init(generator)
        head, own = self._head(0).init(generator), self.body.initial_head
        if {n: v.shape for n, v in own.items()} == {n: v.shape for n, v in head.items()}:
            head = {name: value.clone() for name, value in own.items()}
        return params | head, buffers

    def grow(self, params: Tensors, task: int, rng: Rng) -> Tensors:
        """Return the parameters with the outputs and prompts of a task."""
        params = self.body.grow(params, task, rng)
        head = self._head(task)
        if not head.outputs or head.name in params:
            return params
        return params | head.init(rng.torch_generator("head", task))

    def head_names(self, params: Iterable[str], task: int | None = None) -> tuple[str, ...]:
        """Return the names of the head's parameters: of all tasks, or of one in a growing head."""
        of_task = task is not None and self.outputs.kind == "growing"
        prefix = f"head.{task}." if of_task else "head."
        return tuple(name for name in params if name.startswith(prefix))

    def with_cached_features(self, features: Tensor | None) -> Network:
        """Return a copy that uses cached features of the next batch, [batch, width]."""
        if features is None:
            return self
        return self.with_body(self.body.with_cached_features(features))

    def features(self, params: Tensors, x: Tensor, fwd: ForwardPass) -> Tensor:
        """Return the head's input for a batch: float [batch, feature_size]."""
        return self.body.features(params, x, fwd, len(self.outputs.task_classes))

    def classify(self, params: Tensors, features: Tensor, fwd: ForwardPass) -> Tensor:
        """Return the logits of all outputs, in the order of their tasks: float [batch, outputs]."""
        names = ["head", *(f"head.{task}" for task in range(len(self.outputs.task_classes)))]
        first, *others = [name for name in names if f"{name}.weight" in params]
        weight, bias = params[f"{first}.weight"], params[f"{first}.bias"] if self.bias else None
        if others:
            weight = torch.cat([weight, *(params[f"{name}.weight"] for name in others)])
            if bias is not None:
                bias = torch.cat([bias, *(params[f"{name}.bias"] for name in others)])
            if fwd.layer_inputs is not None:
                fwd.layer_inputs.update({f"{name}.weight": features for name in others})
        return ops.linear(features, weight, bias, fwd, f"{first}.weight")

    def logits(self, params: Tensors, x: Tensor, fwd: ForwardPass) -> Tensor:
        """Return the logits for a batch: float [batch, outputs]."""
        return self.classify(params, self.features(params, x, fwd), fwd)


def make_network(
    config: ModelConfig,
    shape: tuple[int, ...],
    outputs: Outputs,
    setup: BodySetup = BodySetup(),  # noqa: B008
) -> Network:
    """Return the network that a config describes."""
    body = config.make_body(shape, outputs.count(0), setup)
    return Network(body, outputs, config.head_has_bias(body))
