"""Tasks that a router may not tell apart: the same inputs with other labels."""

from __future__ import annotations

from torch import Tensor

from perdure.core.trees import Tensors
from perdure.methods.parts.class_gaussians import ClassGaussians
from perdure.methods.parts.gaussian_router import task_means
from perdure.models.outputs import Outputs

_CLOSEST = 0.1
"""Distance of two tasks' means, relative to the spread of classes, below which they are alike."""


def alike_warnings(gaussians: Tensors, outputs: Outputs) -> dict[str, str]:
    """Return a warning if the features of two of the tasks so far are hardly different.

    Args:
        gaussians: `ClassGaussians.tree()` of the classes of each task, or nothing.
        outputs: Which classes belong to which task.
    """
    if not gaussians:
        return {}
    classes = ClassGaussians.read(gaussians)
    spread = classes.shared_covariance().trace().sqrt().clamp(min=1e-12)
    pair = alike_tasks(task_means(classes, outputs) / spread, _CLOSEST)
    if pair is None:
        return {}
    return {
        "alike": f"fedprotip: the features of task {pair[1] + 1} are hardly different from those "
        f"of task {pair[0] + 1}; tasks with the same inputs and other labels cannot be "
        "distinguished"
    }


def alike_tasks(descriptions: Tensor, closest: float) -> tuple[int, int] | None:
    """Return the first two tasks that are nearer to each other than `closest`, or None.

    Args:
        descriptions: float [tasks, D].
        closest: A distance.
    """
    for task in range(1, len(descriptions)):
        distances = (descriptions[:task] - descriptions[task]).norm(dim=1)
        if float(distances.min()) < closest:
            return int(distances.argmin()), task
    return None
