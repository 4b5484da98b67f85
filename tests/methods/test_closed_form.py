"""The closed-form references equal classifiers that are fitted on all examples together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge
from sklearn.neighbors import NearestCentroid

from perdure.config import parse
from perdure.core.errors import UserError
from perdure.models.ops import ForwardPass
from perdure.training.experiment import Experiment, build_experiment
from perdure.training.loop import run_stream
from perdure.training.state import RunState

SPLIT = {"kind": "split", "tasks": 5}


def trained(method: dict[str, Any], **sections: Any) -> tuple[Experiment, RunState]:
    values = {
        "data": {"limit": 400},
        "stream": SPLIT,
        "clients": {"count": 4, "partition": {"kind": "dirichlet", "alpha": 0.5}},
        "model": {"hidden": [12]},
        "train": {"rounds": 1, "batch_size": 16},
        "engine": {"kind": "serial"},
        "method": method,
    }
    experiment = build_experiment(parse(values | sections))
    return experiment, run_stream(experiment, experiment.initial_state(), lambda state, event: None)


def all_examples(experiment: Experiment, state: RunState, raw: bool) -> tuple[Any, Any]:
    """Return the inputs of the classifier and the labels of all tasks' training sets."""
    xs, ys = [], []
    for task in experiment.stream.tasks:
        index = torch.isin(task.train.y, torch.tensor(task.classes)).nonzero().flatten()
        x = task.train.gather(index)
        fwd = ForwardPass(buffers=state.server.buffers)
        xs.append(x.flatten(1) if raw else experiment.network.features(state.server.params, x, fwd))
        ys.append(task.train.y[index])
    return torch.cat(xs).numpy(), torch.cat(ys).numpy()


@pytest.mark.parametrize("head", ["shared", "growing"])
@pytest.mark.parametrize("inputs", ["features", "raw"])
def test_ridge_regression_over_tasks_and_clients_is_joint(inputs: str, head: str) -> None:
    method = {"kind": "fedridge", "inputs": inputs, "strength": 2.0}
    experiment, state = trained(method, model={"hidden": [12], "head": head})
    x, y = all_examples(experiment, state, inputs == "raw")
    oracle = Ridge(alpha=2.0).fit(x.astype(np.float64), np.eye(10)[y])
    found = experiment.method.head(state.server.state)  # type: ignore[attr-defined]
    labels = experiment.network.outputs.output_labels(4).numpy()
    np.testing.assert_allclose(found.weight, oracle.coef_[labels], atol=1e-6)
    np.testing.assert_allclose(found.bias, oracle.intercept_[labels], atol=1e-6)


def test_class_means_are_those_of_all_examples() -> None:
    experiment, state = trained({"kind": "fedncm", "inputs": "raw"})
    x, y = all_examples(experiment, state, raw=True)
    oracle, task = NearestCentroid().fit(x, y), experiment.task(2)
    tests = task.test.gather(torch.arange(len(task.test.y)))
    logits = experiment.method.predict(state.server, tests, experiment.network)
    np.testing.assert_array_equal(logits.argmax(1), oracle.predict(tests.flatten(1).numpy()))


@pytest.mark.parametrize("kind", ["fedncm", "fedlda", "fedridge"])
def test_nothing_is_trained_and_sums_alone_travel(kind: str) -> None:
    experiment, state = trained({"kind": kind})
    assert state.counters.rounds == 0
    assert state.ledger.types == {"sums": "Sum"}
    initial = experiment.initial_state().server.params
    assert all(torch.equal(value, initial[name]) for name, value in state.server.params.items())


def test_the_body_is_trained_in_the_first_task_alone_if_asked_for() -> None:
    _, state = trained({"kind": "fedlda", "train_first": True})
    assert state.counters.rounds == 1


@pytest.mark.parametrize("kind", ["fedlda", "fedridge"])
def test_secure_sums_give_the_same_answers(kind: str) -> None:
    _, plain = trained({"kind": kind})
    _, secure = trained({"kind": kind}, privacy={"secagg": True})
    assert secure.matrix["task_agnostic"] == plain.matrix["task_agnostic"]


def test_forgetting_is_impossible_where_features_are_frozen() -> None:
    _, state = trained({"kind": "fedridge"})
    aware = state.matrix["task_aware"]
    assert np.mean([v for v in aware[-1] if v is not None]) > 0.9


def test_token_ids_have_no_mean() -> None:
    from perdure.methods.registry import build

    class Text:
        class model:
            kind = "text"
            reads_text = True

    reason = build({"kind": "fedncm", "inputs": "raw"}).check_config(Text)
    assert reason == "method.inputs: must be 'features' with model.kind 'text', got 'raw'"
    with pytest.raises(UserError, match=r"method\.inputs: must be 'features' or 'raw'"):
        build({"kind": "fedncm", "inputs": "pixels"})
