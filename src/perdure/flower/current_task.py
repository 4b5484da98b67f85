"""The task that a node with local data serves, stored so that a restarted node still knows it."""

from __future__ import annotations

import logging
from pathlib import Path

from perdure.core.errors import UserError
from perdure.core.files import write_atomic
from perdure.flower.protocol import BadMessage
from perdure.training.experiment import Experiment

log = logging.getLogger(__name__)


def current_task(folder: Path) -> int:
    """Return the last task that was announced in a run, or -1 if none was.

    Args:
        folder: The node's folder of the run.
    """
    path = folder / "task"
    return int(path.read_text(encoding="ascii")) if path.is_file() else -1


def start_task(folder: Path, experiment: Experiment, node: int, task: int) -> int:
    """Make a task current if its data can be read, and return its number of training examples.

    It may be a task before the current one, since a server may resume from an earlier checkpoint.

    Args:
        folder: The node's folder of the run.
        experiment: The experiment, with the node's data.
        node: Index of the node.
        task: The task, from 0.

    Raises:
        BadMessage: The data cannot be read. The reason is logged here, since it may name files.
    """
    try:
        size = int(experiment.task(task).partition.sizes[node])
    except (UserError, OSError) as error:
        log.error("the data of task %d cannot be used: %s", task + 1, error)
        reason = f"its data of task {task + 1} cannot be used; the node's log says why"
        raise BadMessage(reason) from None
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / "task", str(task).encode())
    return size
