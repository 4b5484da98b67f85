"""Evaluate a model on the test data of nodes, which send counts."""

from __future__ import annotations

import logging
from collections.abc import Callable

from perdure.config import FederationConfig
from perdure.contract.evaluation import EvaluationCounts, Evaluator
from perdure.contract.upload_collector import FailedUpload
from perdure.core.trees import Tree
from perdure.data.streams.stream import Task
from perdure.flower.evaluation_counts import NeededCounts
from perdure.flower.node_replies import Reply, read_node_counts
from perdure.flower.protocol import NodeRequest, RoundPosition
from perdure.flower.waiting import ask_until_quorum
from perdure.runs.model_files import prediction_state
from perdure.training.participation import below_quorum, missing_nodes

log = logging.getLogger(__name__)
Send = Callable[[NodeRequest, dict[int, list[int]], Tree], dict[int, Reply]]
"""Sends a request with a body to nodes for their clients, and returns the replies by node."""


def counts_of_nodes(
    send: Send, federation: FederationConfig | None, nodes: int, evaluator: Evaluator,
    tasks: list[Task],
) -> dict[int, list[EvaluationCounts]]:  # fmt: skip
    """Return the counts of each node, one per task; none of a node without a valid reply.

    Args:
        send: The way to the nodes.
        federation: The `federation` section.
        nodes: Number of nodes.
        evaluator: The model.
        tasks: The tasks on whose data it is evaluated.

    Raises:
        RunError: Nodes are missing for the quorum.
    """
    numbers, last_task = [task.index for task in tasks], evaluator.last_task
    needed = NeededCounts(evaluator.needed_counts, tuple(evaluator.network.outputs.task_classes))
    request, body = _request(evaluator, tasks), _body(evaluator)
    counts: dict[int, list[EvaluationCounts]] = {}

    def ask(chosen: list[int]) -> dict[int, str]:
        replies = send(request, {node: [node] for node in chosen}, body)
        for node, reply in replies.items():
            counts[node] = read_node_counts(reply, numbers, last_task, needed)
        return {node: _reason(replies[node]) for node in chosen if not counts[node]}

    everyone = list(range(nodes))
    failed = ask_until_quorum(federation, everyone, ask)
    missing = missing_nodes(federation, everyone, failed)
    if missing:
        raise below_quorum(f"evaluation after task {last_task + 1}", missing, failed)
    for node, reason in failed.items():
        log.warning("the evaluation after task %d lacks node-%d: %s", last_task + 1, node, reason)
    return counts


def _request(evaluator: Evaluator, tasks: list[Task]) -> NodeRequest:
    return NodeRequest(
        "evaluate", RoundPosition(evaluator.last_task), tasks=tuple(task.index for task in tasks),
        evaluates_on=tasks[0].evaluates_on, counts=evaluator.needed_counts,
    )  # fmt: skip


def _body(evaluator: Evaluator) -> Tree:
    server = evaluator.server
    return {
        "params": server.params,
        "buffers": server.buffers,
        "state": prediction_state(evaluator.method, server.state),
    }


def _reason(reply: Reply) -> str:
    bad = "its evaluation counts are not valid"
    return reply.reason if isinstance(reply, FailedUpload) else bad
