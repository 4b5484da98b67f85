"""All state of a run, explicit: what a checkpoint holds besides the clients' own."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from perdure.federation.evaluation import MODES
from perdure.federation.ledger import Ledger
from perdure.methods.base import Server
from perdure.metrics import Matrix
from perdure.trees import Tree


@dataclass
class Counts:
    """What is counted along the way."""

    rounds: int = 0
    client_updates: int = 0
    rejected: list[dict[str, int]] = field(default_factory=list)
    """Uploads left out because a value was not finite: task, round, client."""
    failures: list[dict[str, Any]] = field(default_factory=list)
    """Clients that did not answer, or not with what was asked: task, round, client, reason."""
    repeated: list[dict[str, int]] = field(default_factory=list)
    """Rounds begun again because too few clients were left: task, round, attempt that counted."""
    missing: int = 0
    """Sampled clients that never reported."""


@dataclass
class State:
    """The position in the stream and everything that was learned and counted until there."""

    server: Server
    task: int = 0
    round: int = 0
    """Rounds of this task that are done."""
    ledger: Ledger = field(default_factory=Ledger)
    counts: Counts = field(default_factory=Counts)
    matrix: dict[str, Matrix] = field(default_factory=lambda: {mode: [] for mode in MODES})
    routing: list[list[float | None]] = field(default_factory=list)
    """Share of examples whose task was told rightly, after each task, for each task."""
    confusion: list[list[float]] | None = None
    """confusion[i][j]: share of task i's examples told to be of task j, after the last task."""
    seconds: dict[str, float] = field(
        default_factory=lambda: {"total": 0.0, "train": 0.0, "consolidate": 0.0, "evaluate": 0.0}
    )
    ends: list[float] = field(default_factory=list)
    """Seconds in all at each task's end."""

    @property
    def steps(self) -> int:
        """Rounds and task ends so far: the number of a checkpoint."""
        return self.counts.rounds + self.task

    def tree(self) -> Tree:
        """The state as a tree that can be saved."""
        return {
            "server": {
                "params": self.server.params,
                "buffers": self.server.buffers,
                "memory": self.server.memory,
            },
            "task": self.task,
            "round": self.round,
            "ledger": asdict(self.ledger),
            "counts": asdict(self.counts),
            "matrix": self.matrix,
            "routing": self.routing,
            "confusion": self.confusion,
            "seconds": self.seconds,
            "ends": self.ends,
        }

    @classmethod
    def from_tree(cls, tree: dict[str, Any]) -> State:
        """The inverse of tree."""
        return cls(
            server=Server(**tree["server"]),
            task=tree["task"],
            round=tree["round"],
            ledger=Ledger(**tree["ledger"]),
            counts=Counts(**tree["counts"]),
            matrix=tree["matrix"],
            routing=tree["routing"],
            confusion=tree.get("confusion"),
            seconds=tree["seconds"],
            ends=tree.get("ends", []),
        )
