"""The final global model of the previous task, used as an anchor or a teacher in the next task."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from perdure.contract import CollectedUploads, Context, Exchange, Server
from perdure.core.trees import Tensors


@dataclass(frozen=True)
class PreviousModel:
    """Server state: the global model w^{k-1} at the start of task k."""

    params: Tensors = field(default_factory=dict)
    """By name, without the outputs that task k added; empty in the first task."""
    buffers: Tensors = field(default_factory=dict)
    """Running statistics of batch norm by name."""


def previous_model(server: Server, context: Context) -> PreviousModel:
    """Return the model at the start of a task."""
    return PreviousModel(without_task_head(server.params, context.task), server.buffers)


def _keep(server: Server, uploads: CollectedUploads, context: Context) -> Server[PreviousModel]:
    return replace(server, state=previous_model(server, context))


KEEP_PREVIOUS_MODEL = Exchange("previous model", participants="none", aggregate=_keep)
"""Opening exchange that stores the model as the server state; for tasks after the first."""


def without_task_head(params: Tensors, task: int) -> Tensors:
    """Return the parameters that existed before a task: all but the outputs that it added."""
    return {name: value for name, value in params.items() if not name.startswith(f"head.{task}.")}


def distance(a: Tensors, b: Tensors) -> float:
    """Return the Euclidean norm of a - b over the names that both have."""
    return total_norm({name: value - b[name] for name, value in a.items() if name in b})


def total_norm(values: Tensors) -> float:
    """Return the Euclidean norm of all values together."""
    norms = [torch.linalg.vector_norm(value) for value in values.values()]
    return float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0
