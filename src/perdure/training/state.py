"""The state of a run: everything that a checkpoint holds besides the client states."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from perdure.contract.context import Server
from perdure.contract.method import Method
from perdure.contract.uploads import Each, StackedUploads, Sum
from perdure.core.errors import RunError, refuse
from perdure.core.states import as_saved, from_tree, to_tree
from perdure.core.trees import Tensors, Tree
from perdure.evaluation.evaluator import MODES, Evaluation
from perdure.evaluation.forgetting import Matrix
from perdure.evaluation.metrics import MetricValues
from perdure.training.ledger import Ledger


@dataclass
class RunCounters:
    """Counts of rounds and uploads since the start of the run."""

    rounds: int = 0
    """Finished training rounds, over all tasks."""
    client_updates: int = 0
    """Uploads that were aggregated in training rounds."""
    rejected: list[dict[str, int]] = field(default_factory=list)
    """Uploads left out because a value was not finite: task, round, client."""
    failures: list[dict[str, Any]] = field(default_factory=list)
    """Clients without an answer or with an invalid one: task, round, client, reason."""
    repeated: list[dict[str, Any]] = field(default_factory=list)
    """Rounds that took several attempts: task, round, the attempt that succeeded, from 0, and the
    clients that uploaded in any of them."""
    missing: int = 0
    """Sampled clients that never uploaded."""
    warnings: list[dict[str, Any]] = field(default_factory=list)
    """Warnings, each key once: key, task, round, text."""
    participation: dict[str, dict[str, int]] = field(default_factory=dict)
    """In a federation, by client: the rounds in which it was sampled, counted, and failed."""


@dataclass(frozen=True)
class PendingUpload:
    """Buffered aggregation: an upload that has not arrived at the server yet."""

    arrival_time: float
    """Simulated time of its arrival."""
    start_round: int
    """The round whose global parameters the client started from."""
    uploads: StackedUploads
    """The upload, as a stack of one client."""
    state: Any
    """The client's new state. If None, it does not change."""
    private: Tensors
    """The client's private parameters."""

    @property
    def client(self) -> int:
        """Index of the client that sent the upload."""
        return self.uploads.clients[0]

    def to_tree(self) -> Tree:
        """Return the upload as a tree for a checkpoint."""
        uploads = self.uploads
        return {
            "arrival_time": self.arrival_time,
            "start_round": self.start_round,
            "client": uploads.clients[0],
            "weight": uploads.weights[0],
            "fields": {
                name: {"type": "Sum" if isinstance(field, Sum) else "Each", **vars(field)}
                for name, field in uploads.fields.items()
            },
            "state": None if self.state is None else to_tree(self.state),
            "private": self.private,
        }

    @classmethod
    def from_tree(cls, tree: Tree, method: Method) -> PendingUpload:
        """Return the upload that `to_tree` turned into `tree`, in a run of `method`."""
        types = {"Sum": Sum, "Each": Each}
        fields = {
            name: types[field["type"]](**{k: v for k, v in field.items() if k != "type"})
            for name, field in tree["fields"].items()
        }
        uploads = StackedUploads((tree["client"],), (tree["weight"],), fields)
        state = tree["state"]
        if state is not None:
            state = from_tree(method.ClientState, state, "client state")
        return cls(tree["arrival_time"], tree["start_round"], uploads, state, tree["private"])


@dataclass
class RunState:
    """The position in the stream, and everything that was learned and counted before it."""

    server: Server
    task: int = 0
    """The current task, from 0."""
    round: int = 0
    """Finished rounds of the current task."""
    ledger: Ledger = field(default_factory=Ledger)
    """Bytes that were sent so far."""
    counters: RunCounters = field(default_factory=RunCounters)
    matrix: dict[str, Matrix] = field(default_factory=lambda: {mode: [] for mode in MODES})
    """By inference mode: accuracy on task j after task i as `matrix[mode][i][j]`."""
    validation: dict[str, Matrix] = field(default_factory=lambda: {mode: [] for mode in MODES})
    """The same on validation rows; no rows without `data.validation`."""
    scores: dict[str, dict[str, Matrix]] = field(default_factory=dict)
    """The same of each metric of `evaluate.metrics`, as `scores[metric][mode][i][j]`."""
    client_scores: list[dict[str, MetricValues]] = field(default_factory=list)
    """Scores of clients with local test data or personal models, after the last task, as
    `client_scores[j][client][metric][mode]`."""
    client_tests: list[dict[str, Any]] = field(default_factory=list)
    """What each node of a federation reported about its test data after the last task, as
    `client_tests[j][node]`: `examples` and `accuracy` by mode."""
    routing: list[list[float | None]] = field(default_factory=list)
    """`routing[i][j]`: fraction of task j's examples whose task was predicted correctly after
    task i."""
    confusion: list[list[float]] | None = None
    """`confusion[i][j]`: fraction of task i's examples for which task j was predicted, after the
    last task. None if the method does not route."""
    seconds: dict[str, float] = field(
        default_factory=lambda: {"total": 0.0, "train": 0.0, "consolidate": 0.0, "evaluate": 0.0}
    )
    """Seconds so far, in total and by part; `consolidate` is opening and task-end exchanges."""
    task_end_seconds: list[float] = field(default_factory=list)
    """Total seconds at each task's end."""
    simulated_time: float = 0.0
    """Buffered aggregation: the simulated time."""
    pending_uploads: list[PendingUpload] = field(default_factory=list)
    """Buffered aggregation: uploads that have not arrived yet."""
    sent_once: dict[str, Any] = field(default_factory=dict)
    """Values that were broadcast as OncePerTask in this task, to notice changes. Not saved."""

    @property
    def checkpoint_number(self) -> int:
        """Number of finished rounds and tasks, by which checkpoints are numbered."""
        return self.counters.rounds + self.task

    def add_evaluations(self, evaluations: list[Evaluation], task_count: int) -> None:
        """Add one row to every matrix."""
        _add_rows(self.matrix, [each.accuracy for each in evaluations], task_count)
        for name in evaluations[0].scores:
            matrices = self.scores.setdefault(name, {mode: [] for mode in MODES})
            _add_rows(matrices, [each.scores[name] for each in evaluations], task_count)
        by_client = [each.client_scores for each in evaluations]
        self.client_scores = [{str(c): s for c, s in each.items()} for each in by_client if each]
        tests = [each.client_tests for each in evaluations]
        self.client_tests = [{str(c): test for c, test in each.items()} for each in tests if each]
        later = [None] * (task_count - len(evaluations))
        self.routing.append([*(evaluation.routing for evaluation in evaluations), *later])
        predicted = [evaluation.predicted_tasks for evaluation in evaluations]
        self.confusion = [row for row in predicted if row is not None] or None

    def add_validation(self, evaluations: list[Evaluation], task_count: int) -> None:
        """Add one row to every matrix of validation; arguments as in `add_evaluations`."""
        _add_rows(self.validation, [each.accuracy for each in evaluations], task_count)

    def fit_rows(self, task_count: int) -> None:
        """Give the rows of all matrices the length of a stream with more or fewer tasks."""
        every = [self.matrix, self.validation, *self.scores.values()]
        for rows in (self.routing, *(rows for matrices in every for rows in matrices.values())):
            for number, row in enumerate(rows):
                rows[number] = [*row, *[None] * task_count][:task_count]

    def to_tree(self) -> Tree:
        """Return the state as a tree for a checkpoint."""
        return {
            "server": {
                "params": self.server.params,
                "buffers": self.server.buffers,
                "state": to_tree(self.server.state),
            },
            "task": self.task,
            "round": self.round,
            "ledger": asdict(self.ledger),
            "counters": asdict(self.counters),
            "matrix": self.matrix,
            "validation": self.validation,
            "scores": self.scores,
            "client_scores": self.client_scores,
            "client_tests": self.client_tests,
            "routing": self.routing,
            "confusion": self.confusion,
            "seconds": self.seconds,
            "task_end_seconds": self.task_end_seconds,
            "simulated_time": self.simulated_time,
            "pending_uploads": [upload.to_tree() for upload in self.pending_uploads],
        }

    @classmethod
    def from_tree(cls, tree: Tree, method: Method) -> RunState:
        """Return the state that `to_tree` turned into `tree`, in a run of `method`."""
        server = tree["server"]
        state = from_tree(method.ServerState, server["state"], "server state")
        return cls(
            server=Server(server["params"], server["buffers"], state),
            task=tree["task"],
            round=tree["round"],
            ledger=Ledger(**tree["ledger"]),
            counters=RunCounters(**tree["counters"]),
            matrix=tree["matrix"],
            validation=tree["validation"],
            scores=tree["scores"],
            client_scores=tree["client_scores"],
            client_tests=tree["client_tests"],
            routing=tree["routing"],
            confusion=tree["confusion"],
            seconds=tree["seconds"],
            task_end_seconds=tree["task_end_seconds"],
            simulated_time=tree["simulated_time"],
            pending_uploads=[
                PendingUpload.from_tree(upload, method) for upload in tree["pending_uploads"]
            ],
        )


def _add_rows(
    matrices: dict[str, Matrix], values: Sequence[Mapping[str, float | None]], task_count: int
) -> None:
    """Add a row to the matrix of every mode, given the values of each task so far by mode."""
    later: list[float | None] = [None] * (task_count - len(values))
    for mode, rows in matrices.items():
        rows.append([by_mode[mode] for by_mode in values] + later)


# ---- The check of a server after an exchange, without which nothing of it is kept or saved


def check_server(method: Method, before: Server, server: Server, where: str) -> Server:
    """Return a server that a checkpoint restores as it is, so that a resumed run is identical.

    Raises:
        ContractError: `server` is not a Server, or its state is not the method's ServerState as a
            checkpoint restores it.
        RunError: A value of `server` is not finite.

    """
    if not isinstance(server, Server):
        refuse(where, f"a {type(server).__name__}", "a Server")
    if not isinstance(server.state, method.ServerState):
        got, expected = type(server.state).__name__, method.ServerState.__name__
        refuse(f"{where}: state", f"a {got}", f"a {expected}")
    check_finite(before, server, where)
    state = server.state
    if state is not before.state:
        state = as_saved(method.ServerState, state, "server state")
    params = {name: value.detach().contiguous() for name, value in server.params.items()}
    buffers = {name: value.detach().contiguous() for name, value in server.buffers.items()}
    return Server(params, buffers, state)


def check_finite(before: Server, server: Server, where: str) -> None:
    """Refuse a server with a value that is not finite; values that did not change are skipped.

    Raises:
        RunError: A parameter, a buffer or a number of the state is not finite.

    """
    known = {id(value) for _, value in _leaves("", [before.params, before.buffers])}
    parts: dict[str, Any] = {"parameters": server.params, "buffers": server.buffers}
    if server.state is not before.state:
        known |= {id(value) for _, value in _leaves("", to_tree(before.state))}
        parts["state"] = to_tree(server.state)
    for name, value in _leaves("", parts):
        if id(value) not in known and not _is_finite(value):
            raise RunError(
                f"{where}: {name} of the server would not be finite; the run stops at its last "
                "checkpoint"
            )


def _leaves(name: str, tree: Any) -> Iterator[tuple[str, Any]]:
    """Yield the numbers and tensors of a tree with their names."""
    if isinstance(tree, dict | list):
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        for key, value in items:
            yield from _leaves(f"{name}/{key}" if name else str(key), value)
    elif isinstance(tree, Tensor | float):
        yield name, tree


def _is_finite(value: Tensor | float) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if not value.is_floating_point():
        return True
    # a finite sum has only finite terms and is checked faster; large terms may overflow it
    return bool(torch.isfinite(value.sum())) or bool(torch.isfinite(value).all())
