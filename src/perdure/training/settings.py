"""What a config leaves to its method, and everything that is fixed while a task is trained."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from perdure.config import Config
from perdure.contract.context import Context
from perdure.contract.exchanges import TaskExchanges, sent_names, trained_names
from perdure.contract.needs import Needs
from perdure.core.errors import bad_value
from perdure.data.streams.stream import Task
from perdure.methods.registry import build, fill_defaults
from perdure.models.network import Outputs

# ------------------------------------------------------------------------------------------------
# Settings that a config may leave to its method: head, outputs in the loss, weights, server step.
#
# A run records what was chosen in its config.yaml. A comparison chooses one value for all its
# methods (`perdure.runs.compare.common_settings`).
# ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OpenSetting:
    """A key of a config whose default is chosen by the method."""

    key: str
    """The key, such as model.head."""
    need: str
    """Name of the preference in `Preferences`."""
    choose: Callable[[Config, Needs], Any]
    """Returns the config's value or, if it has none, the method's preference or the default."""

    def value(self, config: Config) -> Any:
        """Return the value of the key in a config; None if it is left open."""
        section, name = self.key.split(".")
        return getattr(getattr(config, section), name)

    def with_value(self, config: Config, value: Any) -> Config:
        """Return the config with another value of the key."""
        section, name = self.key.split(".")
        changed = getattr(config, section).model_copy(update={name: value})
        return config.model_copy(update={section: changed})


def choose_head(config: Config, needs: Needs) -> Any:
    """Return the kind of the head; UserError if it is not possible on the stream."""
    preferred = {} if config.data.target == "number" else needs.prefers.head
    kind = config.model.head or preferred.get(config.stream.resembles, "shared")
    if kind == "growing" and config.stream.resembles == "pool":
        raise bad_value("model.head", kind, "'shared' on a pool stream")
    return kind


def choose_outputs(config: Config, needs: Needs) -> str:
    """Return the outputs in the loss: all, seen or task."""
    growing = choose_head(config, needs) == "growing"
    default = needs.prefers.active_outputs or ("task" if growing else "all")
    return config.train.outputs or default


def choose_weighting(config: Config, needs: Needs) -> str:
    """Return the clients' weights in the server's mean; clipped updates have equal weights."""
    if config.train.weighting is not None:
        return config.train.weighting
    uniform = config.privacy.clip is not None or needs.prefers.weighting == "uniform"
    return "uniform" if uniform else "samples"


def choose_server_lr(config: Config, needs: Needs) -> float:
    """Return the step size of the server."""
    return config.train.server_lr or needs.prefers.server_lr or 1.0


def choose_server_schedule(config: Config, needs: Needs) -> str:
    """Return the factor on the step size of the server by task."""
    return config.train.server_schedule or needs.prefers.server_schedule or "constant"


HEAD = OpenSetting("model.head", "head", choose_head)
OUTPUTS = OpenSetting("train.outputs", "active_outputs", choose_outputs)
WEIGHTING = OpenSetting("train.weighting", "weighting", choose_weighting)
OPEN_SETTINGS = (
    HEAD,
    OUTPUTS,
    WEIGHTING,
    OpenSetting("train.server_lr", "server_lr", choose_server_lr),
    OpenSetting("train.server_schedule", "server_schedule", choose_server_schedule),
)
"""All of them, each after those that it depends on."""


def fill_open_settings(config: Config, needs: Needs) -> Config:
    """Return the config with every setting filled in that it leaves to the method."""
    for setting in OPEN_SETTINGS:
        config = setting.with_value(config, setting.choose(config, needs))
    return config


def with_method_defaults(config: Config, method_dir: Path | None = None) -> Config:
    """Return the config with everything filled in that it leaves to its method.

    These are the method's hyperparameters, the head, the outputs in the loss, the weights of the
    clients and the step size of the server.
    """
    config = config.model_copy(update={"method": fill_defaults(config.method, method_dir)})
    return fill_open_settings(config, build(config.method, method_dir).needs)


def take_open_settings(config: Config, recorded: Config) -> Config:
    """Return the config with the settings that it leaves open as a run recorded them."""
    for setting in OPEN_SETTINGS:
        if setting.value(config) is None:
            config = setting.with_value(config, setting.value(recorded))
    return config


# ------------------------------------------------------------------------------------------------
# The plan of a task: everything about it that is fixed while it is trained.
# ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TaskPlan:
    """Data, exchanges and settings of one task, made once when the task starts."""

    task: Task
    context: Context
    """The context before the task's first round."""
    exchanges: TaskExchanges
    """The exchanges that the method declares for the task."""
    rounds: int
    """Number of training rounds."""
    server_lr: float
    """Step size by which the server scales an aggregated update."""
    outputs_in_loss: str
    """The active outputs: "task", "seen" or "all"."""
    device: torch.device

    @property
    def outputs(self) -> Outputs:
        """The outputs of the network after this task's were added."""
        return self.context.network.outputs

    @cached_property
    def sent(self) -> dict[str, torch.Size]:
        """Shapes of the parameters that clients train and upload, by name."""
        names = sent_names(self.exchanges.train, self.context)
        return {name: self.context.parameters[name] for name in names}

    @cached_property
    def trainable(self) -> tuple[str, ...]:
        """Names of the parameters that clients train, private ones included."""
        return trained_names(self.exchanges.train, self.context)

    @cached_property
    def targets(self) -> Tensor:
        """Target of every row of the task's training set.

        int64 [rows], the index of the correct output; or float32 [rows], the standardized number.
        """
        labels, origins = self.task.train.y, self.task.train.origins
        if self.outputs.is_number:
            return labels
        if origins is None:
            return self.outputs.targets(self.task.index).to(labels.device)[labels]
        by_task = [self.outputs.targets(task) for task in range(self.task.index + 1)]
        return torch.stack(by_task).to(labels.device)[origins, labels]

    @cached_property
    def active_outputs(self) -> Tensor | None:
        """The outputs that the loss includes, bool [outputs], or None for all of them."""
        if self.outputs_in_loss == "all":
            return None
        if self.outputs_in_loss == "seen" or self.task.train.origins is not None:
            return self.outputs.seen_mask(self.task.index).to(self.device)
        return self.outputs.task_mask(self.task.index, self.task.index).to(self.device)

    def active_outputs_of(self, client: int) -> Tensor | None:
        """Return the active outputs of one client, which may have its own classes of the task."""
        client_classes = self.task.client_classes
        own = self.outputs_in_loss == "task" and self.task.train.origins is None
        if client_classes is None or not own:
            return self.active_outputs
        index = self.task.index
        return self.outputs.task_mask(index, index, client_classes(client)).to(self.device)


def default_trainable(
    names: tuple[str, ...], task: int, cumulative: bool = False
) -> tuple[str, ...]:
    """Return the parameters that are trained in a task unless the method chooses fewer.

    These are all of them, except that only the newest block of a growing head is trained unless
    the task has examples of earlier ones.
    """
    newest = f"head.{task}."
    is_growing = f"{newest}weight" in names and "head.weight" not in names
    if cumulative or not is_growing:
        return names
    return tuple(name for name in names if not name.startswith("head.") or name.startswith(newest))


def server_step_size(config: Config, needs: Needs, task: int) -> float:
    """Return the server's step size in a task, from 0, by `train.server_lr` and its schedule."""
    schedule = choose_server_schedule(config, needs)
    factors = {"constant": 1.0, "1/k": 1 / (task + 1), "1/sqrt(k)": 1 / math.sqrt(task + 1)}
    return choose_server_lr(config, needs) * factors[schedule]
