"""The requirements and preferences of a method, as data, and the weights of its clients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

ALL_STREAMS = frozenset({"permuted", "split", "domains", "pool"})
"""Every kind of stream."""


@dataclass(frozen=True)
class Preferences:
    """What a method chooses for the keys that a config leaves open. None means no preference."""

    head: Mapping[str, Literal["shared", "growing"]] = field(default_factory=dict)
    """Head (`model.head`) by kind of stream. Default: shared."""
    active_outputs: Literal["all", "seen", "task"] | None = None
    """Outputs that the loss includes (`train.outputs`). Default: all under a shared head, the
    task's under a growing one."""
    weighting: Literal["samples", "uniform", "own"] | None = None
    """Client weights of the server's mean (`train.weighting`): number of examples (samples), equal
    (uniform), or those that the method itself gives to its updates (own), to which the preferences
    of combined methods yield. Default: samples."""
    server_lr: float | None = None
    """Step size of the server (`train.server_lr`). Default: 1."""
    server_schedule: Literal["constant", "1/k", "1/sqrt(k)"] | None = None
    """Factor on that step size in task k = 1, 2, ... (`train.server_schedule`). Default:
    constant."""
    demanded: Mapping[str, str] = field(default_factory=dict)
    """Which of `head`, `active_outputs` and `weighting` the paper demands, each with the reason in
    one phrase. In a comparison the others give way to a value that all methods share."""


@dataclass(frozen=True)
class Needs:
    """The requirements and preferences of a method, as data."""

    streams: frozenset[str] = ALL_STREAMS
    """Kinds of streams on which the method can be trained."""
    classes: bool = False
    """Whether the method needs classes, so that it cannot learn numbers (`data.target: number`)."""
    prefers: Preferences = field(default_factory=Preferences)
    """What the method chooses for the keys that a config leaves open."""
    max_client_weight: float = 1.0
    """Largest weight of a Sum, as a multiple of the client's own weight."""
    per_client_fields: tuple[str, ...] = ()
    """Names of the fields that are sent as Each; every Each must be announced here."""
    prediction_state: tuple[str, ...] = ()
    """Fields of the server state that `predict` and `route` use; a trained model exports them."""
    layers: Literal["any", "trained", "protected"] = "any"
    """Whether the method works on trained layers, so that it cannot be combined with prompts
    (trained), and besides protects their inputs, and fixes weights whose inputs are not known after
    the first task (protected)."""
    stable_features: bool = False
    """Whether training hardly changes the features of earlier tasks' examples."""
    stored_examples: bool = False
    """Whether clients keep examples of earlier tasks. `ClientState` then has a function
    `stored_batches(client)` that yields them, which other methods of a combination receive as
    `client.stored_batches()`. The weight of a row is the number of examples that it stands for."""
    personal: bool = False
    """Whether `predict` or `route` use the client's state, so that every client is evaluated."""
    cumulative: bool = False
    """Whether the method can be trained on the examples of all tasks so far, as in a cumulative
    stream: it takes a task's examples as they are and keeps nothing about earlier tasks."""
    task_aware: bool = False
    """Whether `predict` uses `task`, so that task-aware evaluation passes it."""


def max_weight(needs: Needs, examples: float) -> float:
    """Return the largest weight of a Sum of a client that counts with this many examples."""
    return needs.max_client_weight * max(1.0, examples)
