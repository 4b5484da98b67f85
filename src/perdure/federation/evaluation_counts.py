"""The counts of an evaluation as a tree, and back, checked."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

from perdure.algebra.robust import weight_cap
from perdure.core.errors import RunError
from perdure.core.received import (
    Anything,
    Entries,
    Integer,
    Items,
    Number,
    Optional,
    bad,
    read_mapping,
    read_message,
    read_number,
)
from perdure.core.trees import Tensors, Tree
from perdure.data.streams.stream import Task
from perdure.evaluation.counts import is_possible
from perdure.evaluation.evaluator import (
    MODES,
    Evaluation,
    EvaluationCounts,
    Evaluator,
    evaluation_of,
)
from perdure.federation.messages import LARGEST_SIZE, BadMessage, as_bad_message

log = logging.getLogger(__name__)
ShareOf = Callable[[int], float | None]
"""Returns the largest fraction of one node among this many, or None if it is not limited."""


@dataclass(frozen=True)
class NeededCounts:
    """Counts for metrics that nodes are asked for."""

    names: tuple[str, ...] = ()
    """Their names."""
    task_classes: tuple[tuple[int, ...], ...] = ()
    """Labels of each task, which give them their shapes."""


@dataclass(frozen=True)
class SentCounts:
    """Evaluation counts as they arrive."""

    task: Annotated[int, Integer(0, LARGEST_SIZE)]
    """Index of the task."""
    correct: Annotated[dict[str, float], Entries(Number(0, LARGEST_SIZE), MODES)]
    """Correctly predicted examples by mode."""
    total: Annotated[float, Number(0, LARGEST_SIZE)]
    """All examples."""
    predicted_tasks: Annotated[
        tuple[float, ...] | None, Optional(Items(Number(0, LARGEST_SIZE), LARGEST_SIZE))
    ]
    """Examples predicted to be of each task. None if the method cannot route."""
    sums: Annotated[Any, Anything()]
    """Counts for metrics, whose shapes depend on the task."""

    @property
    def routed(self) -> tuple[float, ...]:
        """Examples predicted to be of each task; empty if the method cannot route."""
        return self.predicted_tasks or ()


def counts_tree(counts: EvaluationCounts) -> Tree:
    """Return evaluation counts as a tree."""
    return {
        "task": counts.task,
        "correct": counts.correct,
        "total": counts.total,
        "predicted_tasks": counts.predicted_tasks,
        "sums": counts.sums,
    }


def read_counts(tree: Any, task: int, last_task: int, needed: NeededCounts) -> EvaluationCounts:
    """Read evaluation counts.

    Raises:
        BadMessage: The tree does not hold possible counts.

    """
    with as_bad_message("evaluation counts cannot be read"):
        sent = read_message(SentCounts, "counts", tree)
        total, predicted_tasks = sent.total, sent.predicted_tasks
        for key, value in (*sent.correct.items(), *(("predicted_tasks", n) for n in sent.routed)):
            read_number(key, value, 0, total)
        if predicted_tasks is not None and len(predicted_tasks) != last_task + 1:
            expected = f"counts of {last_task + 1} predicted tasks"
            raise bad("predicted_tasks", len(predicted_tasks), expected)
    modes = MODES if predicted_tasks is not None else MODES[:2]
    sums = _read_sums(sent.sums, modes, total, task, needed) if total else {}
    routed = None if predicted_tasks is None else list(predicted_tasks)
    return EvaluationCounts(task, sent.correct, total, routed, sums)


def _read_sums(
    tree: Any, modes: tuple[str, ...], total: float, task: int, needed: NeededCounts
) -> dict[str, Tensors]:
    """Return the counts for metrics by mode; BadMessage unless all are there and possible."""
    if not needed.names:
        return {}
    classes = len(needed.task_classes[task])
    with as_bad_message("counts for metrics cannot be read"):
        trees = read_mapping("sums", tree, modes)
        sums = {mode: read_mapping(mode, trees[mode], needed.names) for mode in modes}
    for by_name in sums.values():
        for name, value in by_name.items():
            if not is_possible(name, value, classes, total):
                raise BadMessage(f"{name}: must be possible counts of {total} examples")
    return sums


def evaluation_over_nodes(
    evaluator: Evaluator,
    counts: dict[int, list[EvaluationCounts]],
    index: int,
    task: Task,
    share_of: ShareOf,
) -> Evaluation:
    """Return the evaluation on the task at an index, over the counts of all nodes.

    Raises:
        RunError: No node has evaluated the model on it.

    """
    replied = {node: by_task[index] for node, by_task in counts.items() if by_task}
    by_node = {node: each for node, each in replied.items() if each.total}
    if not by_node:
        raise RunError(f"no node could evaluate the model on task {task.index + 1}")
    share = share_of(len(by_node) + len(counts) - len(replied))  # others may have examples, too
    evaluation = evaluation_of(evaluator, capped_counts(by_node, share), by_node)
    return replace(evaluation, client_tests={n: _test(each) for n, each in by_node.items()})


def _test(counts: EvaluationCounts) -> dict[str, Any]:
    """Return the number of a node's test examples, and the accuracy on them."""
    return {"examples": counts.total, "accuracy": counts.evaluation().accuracy}


def capped_counts(
    by_node: Mapping[int, EvaluationCounts], share: float | None
) -> list[EvaluationCounts]:
    """Return the counts of all nodes, of which none has more than a fraction of all examples."""
    totals = [counts.total for counts in by_node.values()]
    cap = math.inf if share is None else weight_cap(totals, share)
    for node, counts in by_node.items():
        if counts.total > cap:
            log.warning(
                "node %d: its %g test examples count as %g (federation.max_node_share)",
                node, counts.total, cap,
            )  # fmt: skip
    return [c.scaled(cap / c.total) if c.total > cap else c for c in by_node.values()]
