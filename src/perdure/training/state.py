"""All state of a run, explicit: what a checkpoint holds besides the clients' own."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from perdure.contract.context import Server
from perdure.contract.evaluation import MODES
from perdure.contract.ledger import Ledger
from perdure.contract.method import Method
from perdure.contract.states import from_tree, to_tree
from perdure.contract.upload_collector import StackedUploads
from perdure.contract.uploads import Each, Sum
from perdure.core.trees import Tensors, Tree
from perdure.training.metrics import Matrix


@dataclass
class RunCounters:
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


@dataclass(frozen=True)
class PendingUpload:
    """Buffered aggregation: what a client has computed and the server has not received yet."""

    arrives: float
    """Simulated time of its arrival."""
    started: int
    """The round with whose model the client began."""
    uploads: StackedUploads
    """A stack of one."""
    state: Any
    """The client's new state; None: it does not change."""
    private: Tensors

    @property
    def client(self) -> int:
        """The client that sent it."""
        return self.uploads.clients[0]

    def tree(self) -> Tree:
        """The upload as a tree that can be saved."""
        uploads = self.uploads
        return {
            "arrives": self.arrives,
            "started": self.started,
            "client": uploads.clients[0],
            "weight": uploads.weights[0],
            "fields": {
                name: {"type": type(part).__name__, **vars(part)}
                for name, part in uploads.fields.items()
            },
            "state": None if self.state is None else to_tree(self.state),
            "private": self.private,
        }

    @classmethod
    def from_tree(cls, tree: Tree, method: Method) -> PendingUpload:
        """The inverse of tree."""
        kinds = {"Sum": Sum, "Each": Each}
        fields = {
            name: kinds[part["type"]](**{k: v for k, v in part.items() if k != "type"})
            for name, part in tree["fields"].items()
        }
        uploads = StackedUploads((tree["client"],), (tree["weight"],), fields)
        kept = tree["state"]
        state = None if kept is None else from_tree(method.ClientState, kept, "client state")
        return cls(tree["arrives"], tree["started"], uploads, state, tree["private"])


@dataclass
class RunState:
    """The position in the stream and everything that was learned and counted until there."""

    server: Server
    task: int = 0
    round: int = 0
    """Rounds of this task that are done."""
    ledger: Ledger = field(default_factory=Ledger)
    counts: RunCounters = field(default_factory=RunCounters)
    matrix: dict[str, Matrix] = field(default_factory=lambda: {mode: [] for mode in MODES})
    routing: list[list[float | None]] = field(default_factory=list)
    """Share of examples whose task was told rightly, after each task, for each task."""
    confusion: list[list[float]] | None = None
    """confusion[i][j]: share of task i's examples told to be of task j, after the last task."""
    seconds: dict[str, float] = field(
        default_factory=lambda: {"total": 0.0, "train": 0.0, "consolidate": 0.0, "evaluate": 0.0}
    )
    task_end_seconds: list[float] = field(default_factory=list)
    """Seconds in all at each task's end."""
    clock: float = 0.0
    """Buffered aggregation: the simulated time."""
    pending: list[PendingUpload] = field(default_factory=list)
    """Buffered aggregation: uploads that have not arrived yet."""
    once: dict[str, Any] = field(default_factory=dict)
    """What was broadcast once in this task, to notice if it changes (not saved)."""

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
                "memory": to_tree(self.server.state),
            },
            "task": self.task,
            "round": self.round,
            "ledger": asdict(self.ledger),
            "counts": asdict(self.counts),
            "matrix": self.matrix,
            "routing": self.routing,
            "confusion": self.confusion,
            "seconds": self.seconds,
            "ends": self.task_end_seconds,
            "clock": self.clock,
            "pending": [upload.tree() for upload in self.pending],
        }

    @classmethod
    def from_tree(cls, tree: dict[str, Any], method: Method) -> RunState:
        """The inverse of tree, for a run of this method."""
        server = tree["server"]
        state = from_tree(method.ServerState, server["memory"], "server state")
        return cls(
            server=Server(server["params"], server["buffers"], state),
            task=tree["task"],
            round=tree["round"],
            ledger=Ledger(**tree["ledger"]),
            counts=RunCounters(**tree["counts"]),
            matrix=tree["matrix"],
            routing=tree["routing"],
            confusion=tree["confusion"],
            seconds=tree["seconds"],
            task_end_seconds=tree["ends"],
            clock=tree["clock"],
            pending=[PendingUpload.from_tree(upload, method) for upload in tree["pending"]],
        )
