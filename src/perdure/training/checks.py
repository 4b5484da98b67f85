"""Checks before training: the method against the config, the exchanges, and the tasks."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from perdure.config import (
    Config,
)
from perdure.config.sentences import join_or
from perdure.contract.exchanges import Train, split_exchanges
from perdure.contract.method import Method
from perdure.contract.needs import Needs
from perdure.core.errors import UserError, bad_value
from perdure.core.trees import Tensors
from perdure.data.streams.stream import Stream
from perdure.models.network import Network
from perdure.privacy.chain import PrivacyChain
from perdure.privacy.secagg.journal import SecAggTransport
from perdure.training.engines.engine import Engine
from perdure.training.task_plan import default_trainable

if TYPE_CHECKING:
    from perdure.training.experiment import Experiment

log = logging.getLogger(__name__)


def check_method(method: Method, config: Config) -> None:
    """Refuse a config that the method cannot run."""
    streams, kind = method.needs.streams, config.stream.kind
    if config.stream.resembles not in streams:
        raise bad_value("stream.kind", kind, f"{', '.join(sorted(streams))} with this method")
    if config.stream.cumulative and not method.needs.cumulative:
        raise bad_value("stream.cumulative", True, "false with this method (Needs.cumulative)")
    if config.data.target == "number":
        check_numbers_possible(method.needs, config)
    reason = method.check_config(config)
    if reason:
        raise UserError(reason)


def check_augmentation(stream: Stream, config: Config) -> None:
    """Refuse `data.augment` for inputs that are not images with their pixels in order."""
    if not config.data.augment:
        return
    names = [change.kind for change in config.data.augment]
    if len(stream.shape) != 3:
        raise bad_value("data.augment", names, "empty for inputs that are not images")
    if not config.stream.keeps_pixels:
        raise bad_value("data.augment", names, f"empty with stream.kind {config.stream.kind}")


def check_numbers_possible(needs: Needs, config: Config) -> None:
    """Refuse a method, stream, partition or head that needs classes if numbers are predicted."""
    with_numbers = "with data.target 'number'"
    if needs.classes:
        expected = f"class with method {config.method['kind']}, which needs classes"
        raise bad_value("data.target", "number", expected)
    if config.stream.needs_classes:
        expected = f"permuted, domains or given {with_numbers}, since there are no classes to split"
        raise bad_value("stream.kind", config.stream.kind, expected)
    if getattr(config.stream, "labels", "shared") == "separate":
        raise bad_value("stream.labels", "separate", f"shared {with_numbers}")
    partition = config.clients.partition
    if partition.needs_classes:
        registry = type(partition).registry()
        kinds = join_or([k for k in registry.builtin if not registry.find(k).needs_classes])
        expected = f"{kinds} {with_numbers}, since there are no classes to divide by"
        raise bad_value("clients.partition.kind", partition.kind, expected)
    if config.model.head == "growing":
        raise bad_value("model.head", "growing", f"shared {with_numbers}")


def warn_of_unprotected(needs: Needs, network: Network) -> None:
    """Name the weights that a projection method fixes, since it cannot protect their inputs."""
    if needs.layers == "protected" and network.body.unprotected:
        names = ", ".join(network.body.unprotected)
        log.warning("not protected, so fixed after the first task: %s", names)


def check_tasks(stream: Stream, config: Config) -> None:
    """Refuse one class alone, and a task without training, test or validation data.

    With `data.target: number`, the targets of a task must be numbers.
    """
    known = stream.tasks[: stream.known_tasks]
    classes = {label for task in known for label in task.classes}
    is_number, fraction = config.data.target == "number", config.data.validation
    if len(classes) == 1 and len(known) == len(stream.tasks) and not is_number:
        only = stream.class_names[classes.pop()]
        raise UserError(f"data: must have examples of two classes or more, got only {only!r}")
    for task in known:
        if is_number and task.numbers is None:
            raise bad_value("data.target", "number", "class with this stream, which has no numbers")
        if fraction and not any(len(group.index) for group in task.validation):
            expected = f"0, or enough to hold out rows of task {task.index + 1} ({task.name})"
            raise bad_value("data.validation", fraction, expected)
        if not task.partition.sizes.any():
            reason = "is held by no client"
        elif not any(len(group.index) for group in task.groups):
            reason = "has no test data"
        else:
            continue
        raise bad_value(
            "stream.tasks", len(stream.tasks),
            f"a number of tasks that all have data (task {task.index + 1}, {task.name}, {reason})",
        )  # fmt: skip


def check_engine(config: Config, privacy: PrivacyChain, engine: Engine) -> None:
    """Refuse an engine whose clients are elsewhere and cannot protect their uploads."""
    if privacy.key is not None and not (engine.in_process or isinstance(engine, SecAggTransport)):
        kind = config.engine.kind
        raise UserError(f"privacy.{privacy.key}: not supported by engine.kind {kind!r}")


def check_exchanges(experiment: Experiment, params: Tensors) -> None:
    """Refuse the exchanges that the method declares for any task if they cannot be run.

    If nodes hold the data, they are not asked about a task before it starts: then all clients are
    assumed to have data of it.
    """
    nodes_hold_data = experiment.stream.agreed is not None
    clients = experiment.config.clients.count if nodes_hold_data else None
    first = experiment.task_context(0, params, clients=clients)
    for task in range(experiment.stream.known_tasks):
        params = experiment.grow(params, task)
        shapes = {name: value.shape for name, value in params.items()}
        context = replace(
            first, task=task, network=experiment.network_at(task), parameters=shapes,
            trainable=default_trainable(tuple(shapes), task, experiment.config.stream.cumulative),
        )  # fmt: skip
        train, config = (
            split_exchanges(experiment.method.exchanges(context)).train,
            experiment.config_at(task),
        )
        check_train(train, experiment.needs, config, experiment.privacy)
        if train.trainable == () and train.rounds != 0:
            raise UserError(
                f"method: freezes every parameter in task {task + 1}; choose options that leave "
                "some trainable"
            )


def check_aggregation(train: Train, needs: Needs, config: Config, privacy: PrivacyChain) -> None:
    """Refuse `train.aggregation` where the server does not see updates, or does not average them"""
    kind, method = config.train.aggregation.kind, config.method["kind"]
    if config.train.aggregation.is_sum:
        return
    reasons = {
        **{reason: True for reason in privacy.against_rules()},
        f"method {method!r} combines the updates itself": (
            train.combine is not None or train.per_client_updates
        ),
        f"method {method!r} sums other fields of uploads itself": (
            train.make_upload is not None and train.adjust is not None
        ),
        f"method {method!r} weights the updates itself": needs.prefers.weighting == "own",
        f"a round of method {method!r} has updates of several ages": train.buffer_size is not None,
    }
    for reason, applies in reasons.items():
        if applies:
            raise bad_value("train.aggregation", kind, f"mean, since {reason}")
    config.train.aggregation.check(config.per_round)


def check_train(train: Train, needs: Needs, config: Config, privacy: PrivacyChain) -> None:
    """Refuse training that the engine or the privacy settings do not support."""
    allowed = "auto, serial or vector, since the method"
    if not privacy.simulated and (needs.personal or train.private):
        raise bad_value("engine.kind", "flower", f"{allowed} has a personal model per client")
    check_aggregation(train, needs, config, privacy)
    if train.buffer_size is None:
        return
    closes = f"closes a round after {train.buffer_size} uploads (Train.buffer_size)"
    if not privacy.simulated:
        raise bad_value("engine.kind", "flower", f"{allowed} {closes}")
    if privacy.key is not None:
        value, kind = getattr(config.privacy, privacy.key), config.method["kind"]
        raise bad_value(f"privacy.{privacy.key}", value, f"off, since {kind!r} {closes}")
