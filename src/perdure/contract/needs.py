"""The requirements and preferences of a method, as data, and the weights of its clients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

# ------------------------------------------------------------------------------------------------
# The requirements and preferences of a method, as data.
# ------------------------------------------------------------------------------------------------

ALL_STREAMS = frozenset({"permuted", "split", "domains", "pool"})
"""Every kind of stream."""


@dataclass(frozen=True)
class Needs:
    """The requirements and preferences of a method, as data. None means no preference."""

    streams: frozenset[str] = ALL_STREAMS
    """Kinds of streams on which the method can be trained."""
    classes: bool = False
    """Whether the method needs classes, so that it cannot learn numbers (`data.target: number`)."""
    head: Mapping[str, Literal["shared", "growing"]] = field(default_factory=dict)
    """Preferred head by kind of stream. Default: shared."""
    active_outputs: Literal["all", "seen", "task"] | None = None
    """Outputs that the loss includes. Default: all under a shared head, the task's under a growing
    one."""
    weighting: Literal["samples", "uniform"] | None = None
    """Client weights of the server's mean: number of examples, or equal. Default: samples."""
    sets_weights: bool = False
    """Whether the method weights its updates itself, so that the preferred weighting of combined
    methods yields to its own."""
    demands: Mapping[str, str] = field(default_factory=dict)
    """Which of `head`, `active_outputs` and `weighting` the paper demands, each with the reason in
    one phrase. In a comparison the others give way to a value that all methods share."""
    server_lr: float | None = None
    """Preferred `train.server_lr`. Default: 1."""
    server_schedule: Literal["constant", "1/k", "1/sqrt(k)"] | None = None
    """Preferred factor on the server step size in task k = 1, 2, ... Default: constant."""
    max_client_weight: float = 1.0
    """Largest weight of a Sum, as a multiple of the client's own weight."""
    per_client_fields: tuple[str, ...] = ()
    """Names of the fields that are sent as Each; every Each must be announced here."""
    prediction_state: tuple[str, ...] = ()
    """Fields of the server state that `predict` and `route` use; a trained model exports them."""
    trained_layers: bool = False
    """Whether the method works on trained layers, so that it cannot be combined with prompts."""
    protected_layers: bool = False
    """Whether the method protects the inputs of layers, and fixes weights whose inputs are not
    known after the first task."""
    stable_features: bool = False
    """Whether training hardly changes the features of earlier tasks' examples."""
    stored_examples: bool = False
    """Whether clients keep examples of earlier tasks, which `stored_batches` yields."""
    personal: bool = False
    """Whether `predict` or `route` use the client's state, so that every client is evaluated."""
    cumulative: bool = False
    """Whether the method can be trained on the examples of all tasks so far, as in a cumulative
    stream: it takes a task's examples as they are and keeps nothing about earlier tasks."""
    task_aware: bool = False
    """Whether `predict` uses `task`, so that task-aware evaluation passes it."""


# ------------------------------------------------------------------------------------------------
# The largest weights with which clients may upload.
# ------------------------------------------------------------------------------------------------


def max_weight(needs: Needs, examples: float) -> float:
    """Return the largest weight of a Sum of a client that counts with this many examples."""
    return needs.max_client_weight * max(1.0, examples)
