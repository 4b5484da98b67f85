"""A network: a body, and a head whose outputs stand for classes and tasks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal

import torch
from torch import Tensor

from perdure.config import ModelConfig, ModuleModel
from perdure.core.rng import Rng
from perdure.core.trees import Tensors
from perdure.models import ops
from perdure.models.adapter.build import ModuleSetup
from perdure.models.adapter.module_body import ModuleBody
from perdure.models.backbones import Card, backbone_card
from perdure.models.factory import make_body
from perdure.models.layers import Body, Layer, linear_layer
from perdure.models.ops import ForwardPass
from perdure.models.prompts import Prompted

# ------------------------------------------------------------------------------------------------
# The assignment of a network's outputs to classes and tasks.
# ------------------------------------------------------------------------------------------------


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
        return self.known(task) if self.kind == "shared" else self.first_output(task + 1)

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
        first = self.first_output(task)
        growing = torch.arange(first, first + len(labels))
        result[labels] = labels if self.kind == "shared" else growing
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


# ------------------------------------------------------------------------------------------------
# A network: a body, and a head with one output per class or one block of outputs per task.
# ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Network:
    """A model as a pure function of named parameters: body -> features, head -> logits."""

    body: Body
    """The network without its head."""
    outputs: Outputs
    """Outputs of the head, and their classes."""
    bias: bool = True
    """Whether the head has a bias."""

    @property
    def feature_size(self) -> int:
        """Values per row that the head gets."""
        return self.body.feature_size

    @property
    def layers(self) -> tuple[Layer, ...]:
        """Every weight matrix of the body, in the order of the forward pass."""
        return self.body.layers

    @property
    def constants(self) -> Tensors:
        """Tensors that are not parameters: the weights of a frozen backbone or frozen modules."""
        return self.body.constants if isinstance(self.body, Prompted | ModuleBody) else {}

    @property
    def backbone(self) -> Card | None:
        """Card of the pretrained weights that it is built on, or None."""
        body = self.body.frozen.backbone if isinstance(self.body, Prompted) else self.body
        return backbone_card(body)

    def with_cached_features(self, features: Tensor | None) -> Network:
        """Return a copy that uses cached features of the next batch, [batch, width]."""
        if features is None or not isinstance(self.body, Prompted):
            return self
        return replace(self, body=self.body.with_cached_features(features))

    def with_constants(self, constants: Tensors) -> Network:
        """Return a copy with other values of its constants."""
        if not isinstance(self.body, Prompted | ModuleBody):
            return self
        return replace(self, body=self.body.with_constants(constants))

    def to(self, device: torch.device) -> Network:
        """Return a copy with its constants on a device."""
        if not isinstance(self.body, Prompted | ModuleBody):
            return self
        return replace(self, body=self.body.to(device))

    def init(self, generator: torch.Generator) -> tuple[Tensors, Tensors]:
        """Return the initial parameters and buffers, with the head of the first task."""
        params, buffers = self.body.init(generator)
        return params | self._initial_head(generator), buffers

    def _initial_head(self, generator: torch.Generator) -> Tensors:
        """Return the head of the first task; that of a custom module if it has the same shape."""
        drawn = self._head(0).init(generator)
        own = self.body.initial_head if isinstance(self.body, ModuleBody) else {}
        if {n: v.shape for n, v in own.items()} != {n: v.shape for n, v in drawn.items()}:
            return drawn
        return {name: value.clone() for name, value in own.items()}

    @property
    def unprotected(self) -> tuple[str, ...]:
        """Weights of the body whose inputs cannot be recorded, so that they are not in `layers`."""
        return self.body.unprotected if isinstance(self.body, ModuleBody) else ()

    @property
    def has_running_statistics(self) -> bool:
        """Whether no batch norm of a module uses the statistics of a batch in predictions, too."""
        return not isinstance(self.body, ModuleBody) or self.body.has_running_statistics

    @property
    def vector_reason(self) -> str | None:
        """Why clients with this network cannot be stacked, or None if nothing is known."""
        return self.body.vector_reason if isinstance(self.body, ModuleBody) else None

    def grow(self, params: Tensors, task: int, rng: Rng) -> Tensors:
        """Return the parameters with the outputs and prompts of a task."""
        if isinstance(self.body, Prompted):
            params = self.body.grow(params, task, rng.torch_generator("prompt", task))
        if not self.outputs.added(task):
            return params
        head = self._head(task)
        return (
            params if head.name in params else params | head.init(rng.torch_generator("head", task))
        )

    @property
    def head_layers(self) -> tuple[Layer, ...]:
        """The blocks of the head; a shared head has one, and one for each addition of classes."""
        tasks = range(len(self.outputs.task_classes))
        return tuple(self._head(task) for task in tasks if self.outputs.added(task))

    def _head(self, task: int) -> Layer:
        """Return the block of outputs that a task adds."""
        first_of_shared = self.outputs.kind == "shared" and task == 0
        name = "head" if first_of_shared else f"head.{task}"
        return linear_layer(name, self.feature_size, self.outputs.added(task), self.bias)

    def head_names(self, params: Iterable[str], task: int | None = None) -> tuple[str, ...]:
        """Return the names of the head's parameters: of all tasks, or of one in a growing head."""
        of_task = task is not None and self.outputs.kind == "growing"
        prefix = f"head.{task}." if of_task else "head."
        return tuple(name for name in params if name.startswith(prefix))

    def features(self, params: Tensors, x: Tensor, fwd: ForwardPass) -> Tensor:
        """Return the head's input for a batch: float [batch, feature_size]."""
        if isinstance(self.body, Prompted):
            return self.body.features(params, x, fwd, len(self.outputs.task_classes))
        return self.body.features(params, x, fwd)

    def classify(self, params: Tensors, features: Tensor, fwd: ForwardPass) -> Tensor:
        """Return the logits of all outputs, in the order of their tasks: float [batch, outputs]."""
        blocks = self._blocks(params)
        weight = _joined([params[f"{name}.weight"] for name in blocks])
        bias = _joined([params[f"{name}.bias"] for name in blocks]) if self.bias else None
        if fwd.layer_inputs is not None:
            fwd.layer_inputs.update({f"{name}.weight": features for name in blocks[1:]})
        return ops.linear(features, weight, bias, fwd, f"{blocks[0]}.weight")

    def _blocks(self, params: Tensors) -> list[str]:
        tasks = range(len(self.outputs.task_classes))
        names = ["head", *(f"head.{task}" for task in tasks)]
        return [name for name in names if f"{name}.weight" in params]

    def logits(self, params: Tensors, x: Tensor, fwd: ForwardPass) -> Tensor:
        """Return the logits for a batch: float [batch, outputs]."""
        return self.classify(params, self.features(params, x, fwd), fwd)


def _joined(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def make_network(
    config: ModelConfig,
    shape: tuple[int, ...],
    outputs: Outputs,
    backbone: Card | None = None,
    setup: ModuleSetup = ModuleSetup(),  # noqa: B008
) -> Network:
    """Return the network that a config describes."""
    body = make_body(config, shape, backbone, outputs.count(0), setup)
    if isinstance(config, ModuleModel):
        return Network(body, outputs, getattr(body, "head_bias", True))
    return Network(body, outputs, config.bias)
