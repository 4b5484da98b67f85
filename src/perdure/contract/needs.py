"""What a method needs, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

ALL_STREAMS = frozenset({"permuted", "split", "domains", "pool"})


@dataclass(frozen=True)
class Needs:
    """What a method needs, as data. None: no preference."""

    streams: frozenset[str] = ALL_STREAMS
    """Kinds of streams that it can learn."""
    head: Mapping[str, Literal["shared", "growing"]] = field(default_factory=dict)
    """The head by kind of stream. Default: shared."""
    active_outputs: Literal["all", "seen", "task"] | None = None
    """The outputs included in the loss under a shared head. Default: all."""
    weighting: Literal["samples", "uniform"] | None = None
    """Weights of the server's mean. Default: samples."""
    server_lr: float | None = None
    """Server step size. Default: 1."""
    server_schedule: Literal["constant", "1/k", "1/sqrt(k)"] | None = None
    """Factor on the server step size in task k = 1, 2, ... Default: constant."""
    max_client_weight: float = 1.0
    """The largest weight of a Sum, as a multiple of the client's own."""
    per_client_fields: tuple[str, ...] = ()
    """Fields that are sent as Each; every Each is checked against it."""
    prediction_state: tuple[str, ...] = ()
    """Fields of the server state that `predict` and `route` read; a trained model exports them."""
    trained_layers: bool = False
    """Whether it works on layers that are trained, so that it cannot combine with prompts."""
    stable_features: bool = False
    """Whether training hardly changes the features of earlier tasks' examples."""
    personal: bool = False
    """Whether `predict` or `route` use the client's state, so that every client is evaluated."""
    task_aware: bool = False
    """Whether `predict` uses `task`, so that task-aware evaluation calls it with the task."""
