"""Announce tasks to nodes with local data, and store how many examples each of them holds.

A node that cannot be reached or refuses is not a node without data: the task waits for it, and the
run stops if it is missing for the quorum. A node that the quorum can spare is asked again before
every round, in which it counts as failed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np

from perdure.config import FederationConfig
from perdure.contract.upload_collector import FailedUpload
from perdure.core.trees import Tree
from perdure.data.source import Array
from perdure.flower.node_replies import Reply, read_size
from perdure.flower.protocol import NodeRequest, RoundPosition
from perdure.flower.waiting import ask_until_quorum
from perdure.training.participation import below_quorum, missing_nodes

log = logging.getLogger(__name__)
Send = Callable[[NodeRequest, list[int]], dict[int, Reply]]
"""Sends a request to nodes, and returns their replies by node."""


class Announcements:
    """The tasks that were announced in this run."""

    def __init__(self, nodes: int, federation: FederationConfig, send: Send) -> None:
        """Announce nothing yet.

        Args:
            nodes: Number of nodes.
            federation: The `federation` section.
            send: The way to the nodes.
        """
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
        """Announce a task again to nodes that serve another one, as after a restart.

        Returns:
            The nodes that do not serve the task, with the reason.
        """
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
