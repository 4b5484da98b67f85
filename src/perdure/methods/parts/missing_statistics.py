"""What methods say if no client may send a statistic, since all groups of rows are too small."""

from __future__ import annotations

import logging

from torch import Tensor

from perdure.contract import Context

log = logging.getLogger(__name__)


def warn_nothing_sent(method: str, context: Context, consequence: str) -> None:
    """Log that no client sent what an exchange of a task collects.

    Args:
        method: Kind of the method.
        context: The exchange.
        consequence: What the method does without it.
    """
    log.warning(
        "task %d: %s: no client has enough rows (privacy.min_rows) to send anything, so that %s",
        context.task + 1, method, consequence,
    )  # fmt: skip


def warn_of_missing_classes(method: str, context: Context, count: Tensor) -> None:
    """Log which classes of the current task no client sent anything about.

    Args:
        method: Kind of the method.
        context: The exchange.
        count: [classes]: rows of each class of the task, or 0 if it is missing.
    """
    classes = context.network.outputs.task_classes[context.task]
    missing = [str(c) for c, n in zip(classes, count.tolist(), strict=True) if not n]
    if missing:
        log.warning(
            "task %d: %s: nothing is known about classes %s: no client has enough rows of them "
            "(privacy.min_rows) to send anything",
            context.task + 1, method, ", ".join(missing),
        )  # fmt: skip


def counts_of_task(count: Tensor, context: Context) -> Tensor:
    """Return the entries of the current task's classes, given those of all outputs [outputs]."""
    outputs, task = context.network.outputs, context.task
    return count[outputs.targets(task)[list(outputs.task_classes[task])].to(count.device)]
