"""Methods that learn numbers (`data.target: number`), and those that need classes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge

from perdure.config import parse
from perdure.core.errors import UserError
from perdure.core.trees import Tensors
from perdure.methods.ewc import sample_targets, sum_squared_gradients
from perdure.methods.registry import METHODS, build
from perdure.models.ops import ForwardPass
from perdure.training.engines.serial import SerialEngine
from perdure.training.engines.vector import VectorEngine
from perdure.training.experiment import Experiment, build_experiment
from perdure.training.loop import run_stream
from perdure.training.state import RunState

NEED_CLASSES = {
    "calibrate", "fedlda", "fedncm", "fedprotip", "flwf-2t", "lwf", "pip", "stamp",
}  # fmt: skip
NEED_BACKBONE = {"fed-l2p", "fed-dualp", "pip"}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    draw = np.random.default_rng(100)
    x = draw.normal(size=(160, 6)).astype(np.float32)
    y = 100 + 20 * x @ draw.normal(size=6) + draw.normal(size=160)
    file = tmp_path_factory.mktemp("numbers") / "numbers.npz"
    np.savez(file, x_train=x[:120], y_train=y[:120], x_test=x[120:], y_test=y[120:])
    return str(file)


def config_of(path: str, kind: str = "fedavg", **changes: Any) -> dict[str, Any]:
    return {
        "data": {"source": "npz", "path": path, "target": "number"},
        "stream": {"kind": "permuted", "tasks": 2},
        "clients": {"count": 3},
        "model": {"kind": "mlp", "hidden": [8]},
        "train": {"rounds": 1, "max_steps": 2, "batch_size": 32, "lr": 0.05},
        "method": {"kind": kind},
        "seed": 100,
        **changes,
    }


def trained(values: dict[str, Any], engine: Any = None) -> tuple[Experiment, RunState]:
    experiment = build_experiment(parse(values), engine=engine or SerialEngine())
    return experiment, run_stream(experiment, experiment.initial_state(), lambda *_: None)


def difference(a: Tensors, b: Tensors) -> float:
    return max(float((value - b[name]).abs().max()) for name, value in a.items())


LEARN = sorted(set(METHODS.builtin) - NEED_CLASSES - NEED_BACKBONE)


@pytest.mark.parametrize("kind", LEARN)
def test_a_method_learns_numbers_alike_on_both_engines(kind: str, path: str) -> None:
    _, serial = trained(config_of(path, kind))
    _, vector = trained(config_of(path, kind), VectorEngine())
    assert difference(serial.server.params, vector.server.params) < 1e-4
    assert len(serial.matrix["task_agnostic"]) == 2
    assert all(value is not None for value in serial.matrix["task_aware"][1])


@pytest.mark.parametrize("kind", sorted(NEED_CLASSES))
def test_a_method_that_needs_classes_says_so(kind: str, path: str) -> None:
    expected = rf"data\.target: must be class with method {kind}, which needs classes, got 'number'"
    with pytest.raises(UserError, match=expected):
        trained(config_of(path, kind))


def test_a_combination_needs_classes_if_a_part_does() -> None:
    assert build({"kind": "fedavg", "with": [{"kind": "lwf"}]}).needs.classes
    assert not build({"kind": "fot", "with": [{"kind": "special"}]}).needs.classes


def test_prompts_learn_numbers(tmp_path: Path) -> None:
    draw = np.random.default_rng(100)
    x = draw.integers(0, 255, (20, 8, 8), dtype=np.uint8)
    y = x.mean((1, 2)).astype(np.float64)
    np.savez(tmp_path / "x.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    model = {"kind": "vit", "patch": 4, "width": 16, "depth": 5, "heads": 2, "init": "random"}
    for kind in ("fed-l2p", "fed-dualp"):
        values = config_of(str(tmp_path / "x.npz"), kind, model=model)
        _, state = trained(values)
        assert state.matrix["task_agnostic"][1][1] < 1


def test_a_step_descends_the_mean_squared_error(path: str) -> None:
    """One full-batch step of one client, against plain PyTorch on standardized targets."""
    train = {"rounds": 1, "max_steps": 1, "batch_size": 120, "lr": 0.05, "momentum": 0.0}
    values = config_of(path, clients={"count": 1}, train=train, stream={"tasks": 1})
    experiment, state = trained(values)
    arrays = np.load(path)
    y = torch.tensor((arrays["y_train"] - arrays["y_train"].mean()) / arrays["y_train"].std())
    x = experiment.task(0).train.gather(torch.arange(120))
    params = {
        n: v.clone().requires_grad_() for n, v in experiment.initial_state().server.params.items()
    }
    outputs = experiment.network.logits(params, x, ForwardPass())
    assert outputs.shape == (120, 1)
    torch.nn.functional.mse_loss(outputs[:, 0], y.float()).backward()
    expected = {name: value.detach() - 0.05 * value.grad for name, value in params.items()}
    assert difference(expected, state.server.params) < 1e-6


@pytest.mark.parametrize("inputs", ["raw", "features"])
def test_fedridge_is_joint_ridge_regression(inputs: str, path: str) -> None:
    method = {"kind": "fedridge", "inputs": inputs, "strength": 2.0}
    experiment, state = trained(config_of(path, method=method))
    network, server = experiment.network, state.server
    x = [experiment.task(t).train.gather(torch.arange(120)) for t in range(2)]
    if inputs == "features":
        x = [network.features(server.params, rows, ForwardPass()) for rows in x]
    rows = torch.cat(x).double().numpy()
    y = np.tile(experiment.task(0).train.y.double().numpy(), 2)
    joint = Ridge(alpha=2.0).fit(rows, y)
    test = experiment.task(1).test.gather(torch.arange(40))
    predicted = experiment.method.predict(server, test, network)
    features = test if inputs == "raw" else network.features(server.params, test, ForwardPass())
    assert predicted.shape == (40, 1)
    assert np.allclose(predicted[:, 0].numpy(), joint.predict(features.numpy()), atol=1e-5)


def test_fisher_information_of_numbers_is_that_of_a_gaussian(path: str) -> None:
    """With p(y | x) of variance 1/2 it is E[(d loss)^2] = 2 (d output)^2 for every parameter."""
    experiment = build_experiment(parse(config_of(path, "ewc", clients={"count": 1})))
    state = experiment.initial_state()
    context = experiment.context(state)
    client = experiment.client(0, context, state.server, {})
    batch = client.data.batch(client.data.index[:1])
    batch = replace(batch, x=batch.x.expand(20000, -1), y=batch.y.expand(20000))
    params = {"head.weight": client.params["head.weight"]}
    y = sample_targets(client, batch, client.draw("labels"))
    output = client.logits(batch)[0, 0]
    assert float(y.mean() - output) == pytest.approx(0, abs=0.02)
    assert float(y.var()) == pytest.approx(0.5, rel=0.05)
    fisher = sum_squared_gradients(client, params, batch, y)["head.weight"] / 20000
    gradient = client.features(batch)[0]
    assert torch.allclose(fisher[0], 2 * gradient.square(), rtol=0.05, atol=1e-6)


def test_replayed_numbers_are_those_that_were_stored(path: str) -> None:
    experiment, _ = trained(config_of(path, "er"))
    state, _ = experiment.client_state(0)
    stored = state.examples
    assert stored.targets.dtype == torch.float32
    known = {round(float(y), 5) for y in experiment.task(0).train.y}
    assert {round(float(y), 5) for y in stored.targets} <= known


REFUSED = [
    (
        {"stream": {"kind": "split", "tasks": 2}},
        r"stream\.kind: must be permuted, domains or given with",
    ),
    (
        {"stream": {"kind": "pool", "tasks": 2}},
        r"stream\.kind: must be permuted, domains or given with",
    ),
    ({"clients": {"partition": {"kind": "dirichlet"}}}, r"clients\.partition\.kind: must be iid, "),
    ({"clients": {"partition": {"kind": "shards"}}}, r"clients\.partition\.kind: must be iid, "),
    ({"model": {"head": "growing"}}, r"model\.head: must be shared with data\.target 'number'"),
    ({"evaluate": {"metrics": ["auroc"]}}, r"evaluate\.metrics: must be worst_client, r2, mae"),
    (
        {"data": {"source": "digits", "target": "number"}},
        r"data\.source: must be npz, table or data in",
    ),
]


@pytest.mark.parametrize(("changes", "sentence"), REFUSED)
def test_what_needs_classes_is_refused(changes: dict[str, Any], sentence: str, path: str) -> None:
    with pytest.raises(UserError, match=sentence):
        build_experiment(parse(config_of(path, **changes)))
