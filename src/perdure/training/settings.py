"""What a config leaves to its method: head, outputs in the loss, weights, server step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perdure.config import Config
from perdure.contract.method import Method
from perdure.contract.needs import Needs
from perdure.core.errors import bad_value
from perdure.methods.registry import build_complete

# ---- Settings that a config may leave to its method: head, outputs in the loss, weights, server
# step
#
# A run records what was chosen in its config.yaml. A comparison chooses one value for all its
# methods (`perdure.runs.compare.common_settings`).


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
    if kind == "growing" and not config.stream.distinct_tasks:
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
    return complete_config(config, method_dir)[0]


def complete_config(config: Config, method_dir: Path | None = None) -> tuple[Config, Method]:
    """Return the config as `with_method_defaults` does, and the method, which is built once."""
    method, section = build_complete(config.method, method_dir)
    config = config.model_copy(update={"method": section})
    return fill_open_settings(config, method.needs), method


def take_open_settings(config: Config, recorded: Config) -> Config:
    """Return the config with the settings that it leaves open as a run recorded them."""
    for setting in OPEN_SETTINGS:
        if setting.value(config) is None:
            config = setting.with_value(config, setting.value(recorded))
    return config
