"""Checks and choices before a run begins: the method against the config, tasks, head, device."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import torch

from perdure.config import Config
from perdure.contract.exchanges import Train
from perdure.contract.method import Method, Needs
from perdure.core.errors import UserError, bad_value
from perdure.data.feature_cache import CacheFolder, with_feature_cache
from perdure.data.streams import Stream
from perdure.models.forward_pass import ForwardPass
from perdure.models.network import Network
from perdure.models.outputs import Outputs
from perdure.models.prompts import Prompted


def check_method(method: Method, config: Config) -> None:
    """Refuse a config that the method cannot run."""
    streams, kind = method.needs.streams, config.stream.kind
    if kind not in streams:
        raise bad_value("stream.kind", kind, f"{', '.join(sorted(streams))} with this method")
    reason = method.check_config(config)
    if reason:
        raise UserError(reason)


def with_feature_cache_of(stream: Stream, network: Network, folder: Path | None = None) -> Stream:
    """The stream with what the network would compute of its rows again and again, if anything."""
    body = network.body
    if not (isinstance(body, Prompted) and body.remembers):
        return stream
    card = network.backbone  # a random one has none, and is not known again
    files = CacheFolder(folder, card["sha256"]) if folder is not None and card else None
    return with_feature_cache(
        stream, lambda x: body.query(x, ForwardPass()), body.feature_size, files
    )


def check_train(train: Train, needs: Needs, config: Config, simulated: bool) -> None:
    """Refuse training that the engine or the privacy settings do not support.

    `simulated`: whether clients are simulated in this process.
    """
    allowed = "auto, serial or vector, since the method"
    if not simulated and (needs.personal or train.private):
        raise bad_value("engine.kind", "flower", f"{allowed} has a personal model per client")
    if train.buffer_size is None:
        return
    closes = f"closes a round after {train.buffer_size} uploads (Train.buffer_size)"
    if not simulated:
        raise bad_value("engine.kind", "flower", f"{allowed} {closes}")
    for key in ("secagg", "clip"):
        value = getattr(config.privacy, key)
        if value:
            raise UserError(
                f"privacy.{key}: got {value!r}, allowed with methods that wait for all uploads of "
                f"a round, but {config.method['kind']!r} {closes}"
            )


def check_tasks(stream: Stream) -> None:
    """Refuse a task that nobody could train or that could not be judged."""
    for task in stream.tasks:
        if not task.partition.sizes.any():
            lack = "no client holds data of"
        elif not any(len(group.index) for group in task.groups):
            lack = "no test data is there for"
        else:
            continue
        raise UserError(
            f"stream.tasks: got {len(stream.tasks)}, but {lack} task {task.index + 1} "
            f"({task.name}), allowed: tasks with training and test data"
        )


def make_outputs(config: Config, method: Method, stream: Stream) -> Outputs:
    """The head's outputs on a stream."""
    preferred: Mapping[str, Literal["shared", "growing"]] = method.needs.head
    kind = config.model.head or preferred.get(stream.kind, "shared")
    if kind == "growing" and stream.kind == "pool":
        raise UserError("model.head: must be shared on a pool stream, got 'growing'")
    return Outputs(kind, stream.classes, stream.task_classes)


def pick_device(name: str) -> torch.device:
    """The device of a config; auto: the best one there is."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name == "auto":
        return torch.device(next((kind for kind, found in there.items() if found), "cpu"))
    if not there.get(name, True):
        found = ", ".join(["auto", "cpu", *(kind for kind, ok in there.items() if ok)])
        raise UserError(f"device: must be {found} on this machine, got {name!r}")
    return torch.device(name)
