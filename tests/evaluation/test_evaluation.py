"""Accuracy in the three modes, on logits made by hand."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from perdure.config import parse
from perdure.contract import Method, Needs, Server
from perdure.data.streams.stream import EvalGroup
from perdure.evaluation import evaluator as evaluation
from perdure.evaluation.evaluator import Evaluation, Evaluator, mean_evaluation
from perdure.models.modules.mlp import MlpModel
from perdure.models.network import Network, Outputs, make_network
from perdure.training.experiment import build_experiment


@dataclass(frozen=True)
class Told(Method):
    """Logits and routes that the test wrote down: row r of a task's test set is the number r."""

    logits: Any = None
    routes: Any = None

    def predict(
        self, server: Server, x: Tensor, network: Any, client_state: Any = None, task: Any = None
    ) -> Tensor:
        return torch.as_tensor(self.logits)[x]

    def route(
        self, server: Server, x: Tensor, network: Any, client_state: Any = None
    ) -> Tensor | None:
        return None if self.routes is None else torch.as_tensor(self.routes)[x]


@dataclass(frozen=True)
class Numbers:
    """Examples whose rows are their own numbers."""

    rows: Tensor
    y: Tensor
    device: str = "cpu"

    def gather(self, index: Tensor) -> Tensor:
        return self.rows[index]

    def gather_cached(self, index: Tensor) -> None:
        return None


def a_task(
    number: int, labels: list[int], groups: list[EvalGroup], client_classes: Any = None
) -> Any:
    return SimpleNamespace(
        index=number, test=Numbers(torch.arange(len(labels)), torch.tensor(labels)),
        groups=groups, client_classes=client_classes, numbers=None, test_clients=None,
    )  # fmt: skip


def no_layers(outputs: Outputs) -> Network:
    return make_network(MlpModel(hidden=[]), (1,), outputs)


def score(outputs: Outputs, newest: int, task: Any, logits: Any, routes: Any = None) -> Evaluation:
    network = no_layers(outputs)
    return Evaluator(Told(logits, routes), Server({}), network, newest).evaluate(task)


def everything(labels: list[int], weight: float = 1.0) -> list[EvalGroup]:
    return [EvalGroup(torch.arange(len(labels)), tuple(sorted(set(labels))), weight)]


SHARED = Outputs("shared", 6, ((0, 1), (2, 3), (4, 5)))


def test_a_shared_head_after_two_tasks() -> None:
    labels = [0, 1, 1, 0]
    logits = [
        [3.0, 1.0, 2.0, 0.0, 9.0, 9.0],  # right; the outputs of the future do not compete
        [1.0, 2.0, 3.0, 0.0, 0.0, 0.0],  # right among the task's own, wrong among all seen
        [2.0, 1.0, 0.0, 0.0, 0.0, 0.0],  # wrong
        [1.0, 0.0, 0.0, 2.0, 0.0, 0.0],  # right among the task's own
    ]
    found = score(SHARED, 1, a_task(0, labels, everything(labels)), logits)
    assert found.accuracy == {"task_agnostic": 0.25, "task_aware": 0.75, "routed": None}
    assert found.routing is None
    assert found.predicted_tasks is None


def test_routing_decides_which_outputs_compete() -> None:
    labels = [2, 3, 3, 2, 3]
    logits = [
        [9.0, 0.0, 1.0, 0.0, 0.0, 0.0],  # routed rightly: right
        [9.0, 0.0, 0.0, 1.0, 0.0, 0.0],  # routed rightly: right
        [9.0, 0.0, 1.0, 0.0, 0.0, 0.0],  # routed rightly: wrong
        [9.0, 0.0, 1.0, 0.0, 0.0, 0.0],  # routed to task 0: wrong
        [0.0, 0.0, 1.0, 5.0, 0.0, 0.0],  # routed to task 0: wrong, though right among all
    ]
    task = a_task(1, labels, everything(labels))
    found = score(SHARED, 1, task, logits, routes=[1, 1, 1, 0, 0])
    # three different numbers: no mode may stand for another
    assert found.accuracy == {"task_agnostic": 0.2, "task_aware": 0.8, "routed": 0.4}
    assert found.routing == 0.6
    assert found.predicted_tasks == [0.4, 0.6]


def test_predicted_tasks_are_weighted_by_group() -> None:
    labels = [0, 0, 1, 1]
    groups = [
        EvalGroup(torch.tensor([0, 1]), (0,), 3.0),
        EvalGroup(torch.tensor([2, 3]), (1,), 1.0),
    ]
    task = a_task(1, labels, groups)
    found = score(SHARED, 2, task, [[0.0] * 6] * 4, routes=[1, 0, 2, 2])
    assert found.predicted_tasks == [3 / 8, 3 / 8, 2 / 8]
    assert found.routing == 3 / 8


def test_a_growing_head_answers_with_labels_not_with_places() -> None:
    """Task 0 is of the classes 5 and 2, task 1 of 0 and 5: the outputs stand for 5, 2, 0, 5."""
    outputs = Outputs("growing", 6, ((5, 2), (0, 5), (1, 3)))
    labels = [5, 0, 5, 0]
    logits = [
        [9.0, 0.0, 0.0, 1.0],  # output 0 says 5: right in both modes
        [0.0, 9.0, 5.0, 1.0],  # agnostic: 2, wrong; aware: 0, right
        [0.0, 0.0, 2.0, 1.0],  # agnostic and aware: 0, wrong
        [0.0, 0.0, 2.0, 1.0],  # right in both
    ]
    task = a_task(1, labels, everything(labels))
    found = score(outputs, 1, task, logits, routes=[0, 0, 1, 0])
    assert found.accuracy == {"task_agnostic": 0.5, "task_aware": 0.75, "routed": 0.25}


def test_pool_groups_are_judged_among_their_own_classes_and_weighted() -> None:
    labels = [0, 1, 2, 3]
    groups = [
        EvalGroup(torch.tensor([0, 1]), (0, 1), 3.0),
        EvalGroup(torch.tensor([2, 3]), (2, 3), 1.0),
        EvalGroup(torch.tensor([1, 2]), (1, 2), 2.0),
    ]
    logits = [
        [2.0, 1.0, 3.0, 0.0, 0.0, 0.0],  # 0: right among (0, 1)
        [0.0, 1.0, 2.0, 3.0, 0.0, 0.0],  # 1: right among (0, 1), wrong among (1, 2)
        [0.0, 0.0, 2.0, 3.0, 0.0, 0.0],  # 2: wrong among (2, 3), right among (1, 2)
        [0.0, 0.0, 2.0, 3.0, 0.0, 0.0],  # 3: right everywhere
    ]
    outputs = Outputs("shared", 6, ((0, 1, 2, 3), (4, 5)))
    pool = a_task(0, labels, groups, client_classes=lambda client: (0, 1))
    found = score(outputs, 0, pool, logits)
    aware = 3 * (1 + 1) + 1 * (0 + 1) + 2 * (0 + 1)
    agnostic = 3 * (0 + 0) + 1 * (0 + 1) + 2 * (0 + 0)
    assert found.accuracy["task_aware"] == pytest.approx(aware / 12)
    assert found.accuracy["task_agnostic"] == pytest.approx(agnostic / 12)


def test_groups_that_do_not_cover_the_test_set() -> None:
    """Rows of other tasks lie between: places in the set and places among the rows differ."""
    labels = [4, 0, 5, 1, 0]
    groups = [EvalGroup(torch.tensor([4, 1, 3]), (0, 1))]
    logits = np.zeros((5, 6))
    logits[1, 0] = logits[3, 1] = logits[4, 1] = 1
    found = score(SHARED, 2, a_task(0, labels, groups), logits)
    assert found.accuracy["task_agnostic"] == pytest.approx(2 / 3)


def test_large_test_sets_are_judged_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    labels, logits = rng.integers(0, 2, 23).tolist(), rng.normal(size=(23, 6))
    routes = rng.integers(0, 2, 23).tolist()
    task = a_task(0, labels, everything(labels))
    whole = score(SHARED, 1, task, logits, routes)
    monkeypatch.setattr(evaluation, "BATCH_ROWS", 5)
    assert score(SHARED, 1, task, logits, routes) == whole
    assert whole.accuracy["task_aware"] == np.mean(logits[:, :2].argmax(1) == labels)
    assert whole.accuracy["task_agnostic"] == np.mean(logits[:, :4].argmax(1) == labels)


@dataclass(frozen=True)
class Aware(Method):
    """Logits that depend on whether the task is given."""

    @property
    def needs(self) -> Needs:
        return Needs(task_aware=True)

    def predict(
        self, server: Server, x: Tensor, network: Any, client_state: Any = None, task: Any = None
    ) -> Tensor:
        best = torch.zeros_like(x) if task is None else 2 * task + x % 2
        return torch.nn.functional.one_hot(best, 6).double()


def test_a_method_that_uses_the_task_gets_it_in_one_mode_only() -> None:
    labels = [2, 3, 2, 3]
    task = a_task(1, labels, everything(labels))
    evaluator = Evaluator(Aware(), Server({}), no_layers(SHARED), 1)
    assert evaluator.evaluate(task).accuracy == {
        "task_agnostic": 0.0,
        "task_aware": 1.0,
        "routed": None,
    }


def test_the_accuracy_of_several_models_is_their_mean() -> None:
    labels = [0, 1, 0, 1]
    task, network = a_task(0, labels, everything(labels)), no_layers(SHARED)
    answers = ([0, 1, 0, 1], [0, 0, 0, 0], [1, 0, 1, 1])
    logits = [torch.nn.functional.one_hot(torch.tensor(said), 6).double() for said in answers]
    models = [Evaluator(Told(values), Server({}), network, 0) for values in logits]
    found = mean_evaluation(models, task)
    assert found.accuracy["task_agnostic"] == pytest.approx((4 + 2 + 1) / 12)


@pytest.mark.parametrize("head", ["shared", "growing"])
def test_a_real_network_against_plain_torch(head: str) -> None:
    values = {
        "data": {"limit": 60},
        "stream": {"kind": "split", "tasks": 3, "classes_per_task": 3},
        "model": {"hidden": [8], "head": head},
    }
    experiment = build_experiment(parse(values))
    server = experiment.initial_state().server
    server = Server(experiment.grow(server.params, 1))
    evaluator = Evaluator(experiment.method, server, experiment.network, 1)
    task = experiment.task(0)
    rows = torch.isin(task.test.y, torch.tensor(task.classes)).nonzero().flatten()
    labels, p = task.test.y[rows], server.params
    hidden = torch.relu(task.test.gather(rows).flatten(1) @ p["fc1.weight"].T + p["fc1.bias"])
    heads = ["head"] if head == "shared" else ["head.0", "head.1"]
    logits = torch.cat([hidden @ p[f"{h}.weight"].T + p[f"{h}.bias"] for h in heads], 1)
    seen = experiment.task(0).classes + experiment.task(1).classes
    stands_for = list(range(10)) if head == "shared" else list(seen)
    for mode, classes in (("task_agnostic", seen), ("task_aware", task.classes)):
        columns = [k for k, label in enumerate(stands_for) if label in classes]
        best = torch.tensor([stands_for[k] for k in columns])[logits[:, columns].argmax(1)]
        expected = (best == labels).double().mean().item()
        assert evaluator.evaluate(task).accuracy[mode] == pytest.approx(expected)


def test_no_known_task_falls_back_on_all_classes_seen_and_counts_as_not_routed() -> None:
    """Rows of task 1: sent to task 1, to task 0, to none with class 2 the best of all, to none."""
    labels = [2, 2, 2, 2]
    best = [[0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 1.0, 0.0], [2.0, 0.0, 1.0, 0.0]]
    outputs = Outputs("growing", 4, ((0, 1), (2, 3)))
    found = score(outputs, 1, a_task(1, labels, everything(labels)), best, [1, 0, -1, -1])
    assert found.accuracy["routed"] == 0.5
    assert found.accuracy["task_agnostic"] == 0.75
    assert found.routing == 0.25
    assert found.predicted_tasks == [0.25, 0.25]


def test_routing_is_vacuous_where_all_tasks_have_the_same_outputs() -> None:
    assert Outputs("shared", 2, ((0, 1), (1, 0))).same_for_all_tasks
    assert not Outputs("shared", 4, ((0, 1), (2, 3))).same_for_all_tasks
    assert not Outputs("growing", 2, ((0, 1), (0, 1))).same_for_all_tasks
