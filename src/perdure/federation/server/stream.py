"""The stream of a federation whose nodes hold local data, as the server sees and announces it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from perdure.config import Config, FederationConfig
from perdure.contract.uploads import FailedUpload
from perdure.core.errors import UserError, bad_value
from perdure.core.trees import Tree
from perdure.data.examples import Array, Examples, NumberScale
from perdure.data.normalization import make_normalization
from perdure.data.streams.build import resolve_normalization
from perdure.data.streams.stream import LazyTasks, Stream, Task
from perdure.federation.messages import NodeRequest, RoundPosition
from perdure.federation.server.replies import Reply, ask_until_quorum, read_size
from perdure.training.sampling import below_quorum, missing_nodes

# ---- The stream of a federation whose nodes hold local data, as the server sees it
#
# The server holds no data, and nodes must not open the data of later tasks. Therefore the config
# says what all machines must agree on: classes, shape and normalization.


def checked_federation(config: Config) -> FederationConfig:
    """Return the federation section, checked against the rest of the config.

    Raises:
        UserError: The two do not fit.

    """
    federation, kind = config.federation, config.stream.kind
    assert federation is not None
    if not config.stream.in_federation:
        raise bad_value("stream.kind", kind, "split or domains in a federation")
    if config.stream.cumulative:
        expected = "false in a federation, whose nodes need not keep the data of earlier tasks"
        raise bad_value("stream.cumulative", True, expected)
    if config.data.normalize is not False and not (config.data.mean and config.data.std):
        expected = (
            "one number per channel in a federation, together with data.std, unless data.normalize "
            "is false, since no machine sees all data"
        )
        raise bad_value("data.mean", config.data.mean, expected)
    if config.data.target == "number":
        _check_numbers(config, federation)
    if federation.tasks is not None and len(federation.tasks) != config.stream.tasks:
        expected = f"one list of classes for each of the {config.stream.tasks} tasks"
        raise UserError(f"federation.tasks: must be {expected}, got {len(federation.tasks)} lists")
    _check_quorum(config, federation)
    return federation


def _check_quorum(config: Config, federation: FederationConfig) -> None:
    """Refuse a quorum that no round can reach."""
    quorum, sampled = federation.quorum, config.per_round
    if isinstance(quorum, int) and quorum > sampled:
        raise bad_value("federation.quorum", quorum, f"at most {sampled}, the clients per round")
    if any(node >= config.clients.count for node in federation.named_nodes):
        last = config.clients.count - 1
        raise bad_value(
            "federation.quorum", quorum, f"a number, or names from node-0 to node-{last}"
        )


def _check_numbers(config: Config, federation: FederationConfig) -> None:
    """Refuse numbers whose name or scale is not agreed on."""
    for key in ("target_mean", "target_std"):
        if getattr(config.data, key) is None:
            expected = "a number in a federation, since no machine sees all data"
            raise bad_value(f"data.{key}", None, expected)
    if len(federation.classes) != 1:
        expected = "one name, that of the number, with data.target 'number'"
        raise bad_value("federation.classes", federation.classes, expected)


def agreed_numbers(config: Config) -> NumberScale | None:
    """Return the scale of numbers that all machines have, or None if classes are predicted."""
    mean, std = config.data.target_mean, config.data.target_std
    if config.data.target == "class" or mean is None or std is None:
        return None
    return NumberScale(mean, std)


def task_classes(config: Config) -> tuple[tuple[int, ...], ...]:
    """Return the class indices of each task.

    Raises:
        UserError: A task names an unknown class.

    """
    federation = checked_federation(config)
    all_classes = tuple(range(len(federation.classes)))
    if federation.tasks is None:
        return (all_classes,) * config.stream.tasks
    indices = {name: index for index, name in enumerate(federation.classes)}
    for names in federation.tasks:
        for name in names:
            if name not in indices:
                known = ", ".join(federation.classes)
                raise bad_value("federation.tasks", name, f"names of federation.classes ({known})")
    return tuple(tuple(sorted(indices[name] for name in names)) for names in federation.tasks)


def no_examples(config: Config) -> Examples:
    """Return one row without a label, of the agreed shape and normalization."""
    row = torch.zeros(1, *checked_federation(config).shape, dtype=input_type(config))
    normalization = make_normalization(row, config.data)
    return Examples(row, torch.zeros(0, dtype=torch.int64), normalization=normalization)


def input_type(config: Config) -> torch.dtype:
    """Return the type of the nodes' inputs: uint8 for images and words, else float32."""
    is_image = len(checked_federation(config).shape) == 3
    return torch.uint8 if config.data.has_texts or is_image else torch.float32


@dataclass(frozen=True)
class NodePartition:
    """A partition of which only the sizes are known; the examples are on the nodes."""

    get_sizes: Callable[[], Array]
    """Returns the number of examples per client: int64 [clients]."""

    @property
    def sizes(self) -> Array:
        """Examples of each client: int64 [clients]."""
        return self.get_sizes()

    def index(self, client: int) -> Tensor:
        """Return one 0 per example of the client, since the server has no rows: int64 [N]."""
        return torch.zeros(1, dtype=torch.int64).expand(int(self.sizes[client]))

    def counts(self, labels: Array, classes: int) -> Array:
        """Raise UserError: the server does not know the labels."""
        raise UserError("the labels that clients hold are not known in a federation")


def remote_stream(config: Config, sizes: Callable[[int], Array]) -> Stream:
    """Return the stream as the server sees it, with sizes and without data.

    Args:
        config: A config with a federation section.
        sizes: Returns the number of examples per client of a task: int64 [clients].

    """
    config = resolve_normalization(config)
    federation, classes = checked_federation(config), task_classes(config)
    rows, numbers = no_examples(config), agreed_numbers(config)

    def make(number: int) -> Task:
        partition = NodePartition(lambda: sizes(number))
        name = f"task {number + 1}"
        return Task(
            number, name, classes[number], rows, rows, partition, (), numbers=numbers,
        )  # fmt: skip

    tasks = LazyTasks(config.stream.tasks, make)
    shape = tuple(federation.shape)
    return Stream(config.stream.kind, tasks, tuple(federation.classes), shape, classes)


# ---- Announce tasks to nodes with local data, and store how many examples each of them holds
#
# A node that cannot be reached or refuses is not a node without data: the task waits for it, and
# the run stops if it is missing for the quorum. A node that the quorum can spare is asked again
# before every round, in which it counts as failed.

log = logging.getLogger(__name__)
Send = Callable[[NodeRequest, list[int]], dict[int, Reply]]
"""Sends a request to nodes, and returns their replies by node."""


class Announcements:
    """The tasks that were announced in this run."""

    def __init__(self, nodes: int, federation: FederationConfig, send: Send) -> None:
        """Announce nothing yet."""
        self._nodes, self._send = list(range(nodes)), send
        everyone = federation.model_copy(update={"quorum": nodes})
        self._federation = federation if federation.quorum is not None else everyone
        self._sizes: dict[int, dict[int, int]] = {}
        self._current: dict[int, int] = {}  # by node, the task that it serves
        self._reasons: dict[int, str] = {}  # of nodes that the last task lacks
        self._is_due = True  # whether these are to be asked again

    def sizes(self, task: int) -> Array:
        """Return how many training examples of a task each node holds: int64 [nodes].

        The task is announced when it is first asked for. A node that could not be asked, and that
        the quorum can spare, counts as 0 until it replies; it is asked again after every exchange.

        Raises:
            RunError: Nodes are missing for the quorum.

        """
        if task not in self._sizes:
            self._sizes[task] = self._begin(task)
        elif self._is_due and task == max(self._sizes):
            self._reasons = self._announce(task, self._absent(task), self._sizes[task])
        self._is_due = False
        return np.array([self._sizes[task].get(node, 0) for node in self._nodes], dtype=np.int64)

    def not_reached(self, task: int) -> list[FailedUpload]:
        """Return the nodes that an exchange lacks; they are asked again before the next one."""
        self._is_due = True
        unknown = "the task was not announced to it"
        return [FailedUpload(n, self._reasons.get(n, unknown)) for n in self._absent(task)]

    def _absent(self, task: int) -> list[int]:
        return [node for node in self._nodes if node not in self._sizes[task]]

    def catch_up(self, task: int, nodes: list[int]) -> dict[int, FailedUpload]:
        """Announce a task again to nodes that serve another one, as after a restart."""
        behind = [node for node in nodes if self._current.get(node) != task]
        failed = self._announce(task, behind, self._sizes.get(task, {}))
        return {node: FailedUpload(node, reason) for node, reason in failed.items()}

    def to_tree(self) -> Tree:
        """Return the sizes for the checkpoint; None where a node has not replied."""
        return {str(t): [sizes.get(n) for n in self._nodes] for t, sizes in self._sizes.items()}

    def restore(self, tree: Tree) -> None:
        """Restore the sizes, so that nodes need not hold the data of earlier tasks any more."""
        self._sizes = {
            int(task): {node: size for node, size in enumerate(sizes) if size is not None}
            for task, sizes in tree.items()
        }

    def _begin(self, task: int) -> dict[int, int]:
        """Announce a task to all nodes until the quorum is reached, and return their sizes."""
        sizes: dict[int, int] = {}
        failed = ask_until_quorum(
            self._federation, self._nodes, lambda nodes: self._announce_data(task, nodes, sizes)
        )
        missing = missing_nodes(self._federation, self._nodes, failed)
        if missing:
            raise below_quorum(f"start of task {task + 1}", missing, failed)
        for node, reason in failed.items():
            log.warning("task %d begins without node-%d: %s", task + 1, node, reason)
        self._reasons = failed
        return sizes

    def _announce_data(self, task: int, nodes: list[int], sizes: dict[int, int]) -> dict[int, str]:
        """Announce a task; if no node holds data of it, all of them fail."""
        failed = self._announce(task, nodes, sizes)
        if any(sizes.values()):
            return failed
        return dict.fromkeys(sizes, f"it holds no examples of task {task + 1}") | failed

    def _announce(self, task: int, nodes: list[int], sizes: dict[int, int]) -> dict[int, str]:
        """Announce a task, add the sizes of nodes that accept it, and return why others do not."""
        request = NodeRequest("announce", RoundPosition(task))
        replies = self._send(request, nodes) if nodes else {}
        failed: dict[int, str] = {}
        for node, reply in replies.items():
            size = read_size(node, reply)
            if isinstance(size, FailedUpload):
                failed[node] = size.reason
            else:
                self._current[node] = task
                sizes[node] = sizes.get(node) or size
        return failed
