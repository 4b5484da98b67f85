"""Transforms of local steps against plain torch formulas, alone and as both engines apply them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from perdure.algebra.subspaces import Subspace
from perdure.config import parse
from perdure.contract import (
    AddToGradient,
    Client,
    Context,
    ContractError,
    Exchange,
    Method,
    Prepared,
    ProjectOut,
    Proximal,
    Train,
    Transform,
)
from perdure.contract.transforms import project_out_weight
from perdure.core.trees import Tensors
from perdure.training.experiment import Experiment, build_experiment
from perdure.training.local_training import BatchSchedule, batch_schedule
from perdure.training.loop import begin_task
from perdure.training.optimizers import OPTIMIZERS
from perdure.training.round import train_round

SHAPES = {"w": (4, 3), "b": (4,), "free": (2,)}
SIZES = {name: torch.Size(shape) for name, shape in SHAPES.items()}


def drawn(seed: int, names: tuple[str, ...] = tuple(SHAPES)) -> Tensors:
    draw = torch.Generator().manual_seed(seed)
    values = {n: torch.randn(s, generator=draw, dtype=torch.float64) for n, s in SHAPES.items()}
    return {name: values[name] for name in names}


GRADS, PARAMS, ANCHOR, CURVATURE = drawn(0), drawn(1), drawn(2, ("w", "b")), drawn(3, ("w", "b"))


def assert_close(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12)


# ---- one step


def test_adding_to_the_gradient() -> None:
    found = AddToGradient(ANCHOR).on_gradient(GRADS, PARAMS)
    assert_close(found, GRADS | {name: GRADS[name] + value for name, value in ANCHOR.items()})
    assert AddToGradient(ANCHOR).acts_on_gradient()
    assert not AddToGradient(ANCHOR).acts_on_step(sums_gradients=False)


@pytest.mark.parametrize("curvature", [None, CURVATURE], ids=["plain", "weighted"])
def test_a_proximal_term_adds_its_gradient(curvature: Tensors | None) -> None:
    """It is that of (s / 2) sum c (w - a)^2, as autograd finds it."""
    leaves = {name: PARAMS[name].clone().requires_grad_() for name in ANCHOR}
    weights = curvature or {name: torch.ones_like(value) for name, value in ANCHOR.items()}
    term = sum(
        (0.35 * weights[n] * (leaves[n] - ANCHOR[n]) ** 2).sum() for n in ANCHOR
    )  # fmt: skip
    assert isinstance(term, Tensor)
    expected = torch.autograd.grad(term, list(leaves.values()))
    towards = {name: weights[name] * value for name, value in ANCHOR.items()}
    found = Proximal(towards, 0.7, curvature).on_gradient(GRADS, PARAMS)
    pulled = {n: GRADS[n] + more for n, more in zip(leaves, expected, strict=True)}
    assert_close(found, GRADS | pulled)


@pytest.mark.parametrize("curvature", [None, CURVATURE], ids=["plain", "weighted"])
def test_an_implicit_proximal_term_is_a_minimum(curvature: Tensors | None) -> None:
    """W minimizes (1 / 2 lr) (w - v)^2 + (s / 2) c (w - a)^2, whose gradient at it is zero."""
    lr, strength = 0.1, 0.7
    curved = {n: c.abs() for n, c in curvature.items()} if curvature else None
    weights = curved or {name: torch.ones_like(value) for name, value in ANCHOR.items()}
    towards = {name: weights[name] * value for name, value in ANCHOR.items()}
    term = Proximal(towards, strength, curved, implicit=True)
    found = term.on_step(PARAMS, GRADS, lr)
    assert torch.equal(found["free"], PARAMS["free"])
    for name, anchor in ANCHOR.items():
        slope = (found[name] - PARAMS[name]) / lr
        slope += strength * weights[name] * (found[name] - anchor)
        torch.testing.assert_close(slope, torch.zeros_like(slope), rtol=0, atol=1e-12)
    assert term.on_gradient(GRADS, PARAMS) is GRADS
    assert not term.acts_on_gradient()
    assert term.acts_on_step(sums_gradients=True)
    plain = replace(term, implicit=False)
    assert plain.acts_on_gradient()
    assert not plain.acts_on_step(sums_gradients=True)
    assert plain.on_step(PARAMS, GRADS, lr) is PARAMS


def basis(inputs: int, rank: int, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(inputs, rank, generator=draw, dtype=torch.float64))[0]


@pytest.mark.parametrize("rank", [1, 2])
def test_projecting_out_a_subspace_of_the_inputs(rank: int) -> None:
    o = basis(3, rank)
    found = ProjectOut({"w": Subspace.of(o).tree()}).on_gradient(GRADS, PARAMS)
    assert_close(found, GRADS | {"w": GRADS["w"] - GRADS["w"] @ o @ o.T})
    inside = torch.randn(5, rank, dtype=torch.float64) @ o.T
    torch.testing.assert_close(inside @ found["w"].T, torch.zeros(5, 4, dtype=torch.float64))


def test_a_step_that_is_no_sum_of_gradients_is_projected_itself() -> None:
    o = basis(3, 1)
    project = ProjectOut({"w": Subspace.of(o).tree()})
    before = drawn(5)
    found = project.on_step(PARAMS, before, 0.1)
    moved = PARAMS["w"] - before["w"]
    assert_close(found, PARAMS | {"w": before["w"] + moved - moved @ o @ o.T})
    sums = [OPTIMIZERS.find(kind).sums_gradients for kind in ("sgd", "adam", "adamw")]
    assert list(map(project.acts_on_step, sums)) == [False, True, True]


def test_a_convolution_counts_as_a_matrix() -> None:
    change = torch.randn(4, 3, 2, 2, dtype=torch.float64)
    o, flat = basis(12, 5), change.reshape(4, 12)
    expected = (flat - flat @ o @ o.T).reshape(4, 3, 2, 2)
    torch.testing.assert_close(project_out_weight(change, Subspace.of(o).tree()), expected)


# ---- what is refused


@pytest.mark.parametrize(
    ("transform", "sentence"),
    [
        (AddToGradient({"v": torch.ones(2)}), "AddToGradient: must be one of w, b, free, got 'v'"),
        (AddToGradient({"b": torch.ones(5)}), r"'b': must be of shape \[4\], got shape \[5\]"),
        (
            Proximal({"w": torch.ones(4)}, 1.0),
            r"Proximal: 'w': must be of shape .*, got shape \[4\]",
        ),
        (
            Proximal({"b": torch.ones(4)}, 1.0, {"b": torch.ones(1)}),
            r"transform Proximal: 'b': must be of shape \[4\], got shape \[1\]",
        ),
        (
            ProjectOut({"w": Subspace.of(basis(4, 1)).tree()}),
            "'w': must be a basis of 3 rows, the inputs of the weight, got a basis of 4 rows",
        ),
        (ProjectOut({"wx": Subspace.of(basis(3, 1)).tree()}), r"got 'wx' .did you mean 'w'"),
    ],
    ids=["name", "shape", "anchor", "curvature", "basis", "weight"],
)
def test_names_and_shapes_that_the_model_lacks_are_refused(
    transform: Transform, sentence: str
) -> None:
    with pytest.raises(ContractError, match=sentence):
        transform.check(SIZES)


def test_missing_parameters_are_zeros_where_zeros_are_neutral() -> None:
    assert AddToGradient({}).zero_is_neutral
    assert ProjectOut({}).zero_is_neutral
    assert Proximal(ANCHOR, 1.0, CURVATURE).zero_is_neutral
    assert not Proximal(ANCHOR, 1.0).zero_is_neutral


def test_a_transform_that_does_nothing_says_so() -> None:
    assert not Transform().acts_on_gradient()
    assert not Transform().acts_on_step(sums_gradients=False)
    assert Transform().on_gradient(GRADS, PARAMS) is GRADS
    assert Transform().on_step(PARAMS, GRADS, 0.1) is PARAMS


# ---- as engines apply them


@dataclass(frozen=True)
class Halve(Transform):
    """Half of the gradient, and back by a tenth of the way after the step."""

    def on_gradient(self, grads: Tensors, params: Tensors) -> Tensors:
        return {name: g / 2 for name, g in grads.items()}

    def on_step(self, params: Tensors, before: Tensors, lr: float) -> Tensors:
        return {name: p - 0.1 * (p - before[name]) for name, p in params.items()}


@dataclass(frozen=True)
class Transformed(Method):
    """Every client pulls, adds and halves, with separate tensors."""

    kinds: tuple[str, ...] = ()

    def exchanges(self, context: Context) -> list[Exchange | Train]:
        return [Train(prepare=self.prepare)]

    def prepare(self, client: Client) -> Prepared:
        made = own_transforms(client.id, client.params)
        return Prepared(transforms=tuple(made[kind] for kind in self.kinds))


def own_transforms(client: int, params: Tensors) -> dict[str, Transform]:
    """Transforms of the first layer that depend on the client."""
    draw = torch.Generator().manual_seed(client)
    names = ("fc1.weight", "fc1.bias")
    value = {n: torch.randn(params[n].shape, generator=draw) for n in names}
    o = torch.linalg.qr(torch.randn(64, 3 + client, generator=draw))[0]
    return {
        "add": AddToGradient(value),
        "near": Proximal({n: v / 2 for n, v in value.items()}, 0.5),
        "implicit": Proximal(value, 0.5, implicit=True),
        "halve": Halve(),
        "project": ProjectOut({"fc1.weight": Subspace.of(o).tree()}),
    }


VALUES: dict[str, Any] = {
    "data": {"limit": 90, "test_limit": 50},
    "stream": {"tasks": 1},
    "clients": {"count": 3, "partition": {"kind": "dirichlet", "alpha": 0.5}},
    "model": {"hidden": [6]},
}


def plain_round(experiment: Experiment, start: Tensors, kinds: tuple[str, ...]) -> Tensors:
    """The same round in torch's own functions."""
    train, task, total = experiment.config.train, experiment.task(0), 0.0
    mean = {name: torch.zeros_like(value) for name, value in start.items()}
    state = experiment.initial_state()
    for number in range(3):
        client = experiment.client(number, experiment.context(state), state.server, {})
        made = own_transforms(number, start)
        trained = plain_client(
            batch_schedule(client, train), client, start, [made[kind] for kind in kinds], train
        )
        weight = len(task.partition.index(number))
        mean = {n: m + weight * (trained[n] - start[n]) for n, m in mean.items()}
        total += weight
    return {name: start[name] + value / total for name, value in mean.items()}


def plain_client(
    schedule: BatchSchedule, client: Client, start: Tensors, transforms: list[Any], train: Any
) -> Tensors:
    leaves = {name: value.clone().requires_grad_() for name, value in start.items()}
    optimizer = torch.optim.SGD(leaves.values(), lr=train.lr, momentum=train.momentum)
    for rows in schedule:
        batch = client.data.batch(rows)
        hidden = functional.linear(batch.x.flatten(1), leaves["fc1.weight"], leaves["fc1.bias"])
        logits = functional.linear(
            torch.relu(hidden), leaves["head.weight"], leaves["head.bias"]
        )  # fmt: skip
        optimizer.zero_grad()
        functional.cross_entropy(logits, batch.y).backward()
        before = {name: leaf.detach().clone() for name, leaf in leaves.items()}
        with torch.no_grad():
            for leaf in leaves.values():
                leaf.grad += train.weight_decay * leaf  # type: ignore[operator]
            for transform in transforms:
                _on_gradient(transform, leaves)
            if train.clip is not None:
                torch.nn.utils.clip_grad_norm_(leaves.values(), train.clip)
        optimizer.step()
        with torch.no_grad():
            for transform in transforms:
                _on_step(transform, leaves, before, train.lr)
    return {name: leaf.detach() for name, leaf in leaves.items()}


def _on_gradient(transform: Any, leaves: Tensors) -> None:
    for name, leaf in leaves.items():
        assert leaf.grad is not None
        if isinstance(transform, AddToGradient) and name in transform.values:
            leaf.grad += transform.values[name]
        elif isinstance(transform, Proximal) and not transform.implicit:
            if name in transform.towards:
                leaf.grad += transform.strength * (leaf - transform.towards[name])
        elif isinstance(transform, Halve):
            leaf.grad /= 2
        elif isinstance(transform, ProjectOut) and name in transform.subspaces:
            (o,) = transform.subspaces[name].values()
            leaf.grad -= leaf.grad @ o @ o.T


def _on_step(transform: Any, leaves: Tensors, before: Tensors, lr: float) -> None:
    for name, leaf in leaves.items():
        if isinstance(transform, Proximal) and transform.implicit and name in transform.towards:
            pull = lr * transform.strength
            leaf.copy_((leaf + pull * transform.towards[name]) / (1 + pull))
        elif isinstance(transform, Halve):
            leaf.sub_(0.1 * (leaf - before[name]))


@pytest.mark.parametrize("engine", ["serial", "vector"])
@pytest.mark.parametrize(
    ("kinds", "train"),
    [
        (("add",), {}),
        (("near",), {"weight_decay": 0.1}),
        (("implicit",), {"momentum": 0.5}),
        (("project",), {"momentum": 0.5}),
        (("halve", "add"), {}),
        (("add", "halve"), {}),
        (("implicit", "halve"), {}),
        (("halve", "implicit"), {}),
        (("near", "project", "halve"), {"weight_decay": 0.1, "momentum": 0.5}),
        (("add", "project"), {"weight_decay": 0.1, "clip": 0.5}),
        ((), {"clip": 1e-4, "lr": 100.0}),  # a second clipping would take another 1%
    ],
    ids=str,
)
def test_a_round_is_that_of_plain_torch(
    kinds: tuple[str, ...], train: dict[str, Any], engine: str
) -> None:
    method = {"kind": f"{__name__}.Transformed", "kinds": list(kinds)}
    settings = {"rounds": 1, "batch_size": 16, "lr": 0.05, **train}
    values = {**VALUES, "method": method, "train": settings, "engine": {"kind": engine}}
    experiment = build_experiment(parse(values))
    state = experiment.initial_state()
    begin_task(experiment, state)
    start = state.server.params
    train_round(experiment, state)
    if engine == "vector":
        assert not experiment.engine.choice()["serial"]
    expected = plain_round(experiment, start, kinds)
    for name, value in state.server.params.items():
        found, wanted = value - start[name], expected[name] - start[name]
        scale = float(wanted.abs().max())
        torch.testing.assert_close(found / scale, wanted / scale, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-5)
