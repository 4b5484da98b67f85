"""EWC against computations that share no code with it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from baseline_runs import TINY, client_of, experiment, train_of

from perdure.contract import Transform
from perdure.core.errors import UserError
from perdure.methods.ewc import Ewc, FisherSums
from perdure.models.ops import ForwardPass
from perdure.training.engines.serial import train_client
from perdure.training.local_training import LocalTraining
from perdure.training.optimizers import OPTIMIZERS


def test_statistics_of_a_single_example_are_refused() -> None:
    model = {"hidden": [8], "norm": "batch", "running_stats": False}
    with pytest.raises(
        UserError, match=r"^model\.running_stats: must be true with ewc and batch norm, got False"
    ):
        experiment({"kind": "ewc"}, model=model)
    experiment({"kind": "ewc"}, model=model | {"norm": "group"})


class RowsTogether(torch.nn.Sequential):
    """A custom module whose batch norm knows the batch alone."""

    def __init__(self, track: bool = False) -> None:
        norm = torch.nn.BatchNorm1d(8, track_running_stats=track)
        super().__init__(torch.nn.Flatten(), torch.nn.Linear(64, 8), norm, torch.nn.Linear(8, 10))


def test_statistics_of_a_single_example_are_refused_for_custom_modules() -> None:
    model = {"kind": f"{__name__}.RowsTogether"}
    refused = experiment({"kind": "ewc"}, model=model)
    with pytest.raises(UserError, match=r"^model: must be a module whose batch norms have running"):
        refused.initial_state()
    experiment({"kind": "ewc"}, model=model | {"track": True}).initial_state()
    experiment({"kind": "fedavg"}, model=model).initial_state()


def test_empirical_fisher_is_the_mean_of_squared_gradients() -> None:
    client = client_of(experiment())
    found = Ewc(fisher="empirical", samples=None).fisher_information(client)
    squares = {name: np.zeros(value.shape) for name, value in client.params.items()}
    for row in client.data.index:
        leaves = {n: v.clone().requires_grad_() for n, v in client.params.items()}
        x = client.data.examples.gather(row.reshape(1)).flatten(1)
        hidden = torch.relu(x @ leaves["fc1.weight"].T + leaves["fc1.bias"])
        logits = hidden @ leaves["head.weight"].T + leaves["head.bias"]
        loss = torch.nn.functional.cross_entropy(logits, client.data.targets[row].reshape(1))
        loss.backward()
        for name, leaf in leaves.items():
            squares[name] += leaf.grad.numpy() ** 2  # type: ignore[union-attr]
    for name, value in squares.items():
        np.testing.assert_allclose(found[name], value / len(client.data), rtol=1e-3, atol=1e-7)


def test_labels_for_the_fisher_come_from_the_model() -> None:
    made = experiment()
    client = client_of(made)
    sharp = client.params | {"head.weight": torch.zeros_like(client.params["head.weight"])}
    bias = torch.full_like(client.params["head.bias"], -50.0)
    bias[3] = 50.0  # certain of output 3: its own labels carry no surprise, the data's do
    client = replace(client, params=sharp | {"head.bias": bias})
    assert max(float(v.max()) for v in Ewc().fisher_information(client).values()) < 1e-12
    assert float(Ewc(fisher="empirical").fisher_information(client)["head.bias"].max()) > 0.1


def penalty_of(method: Ewc, fisher: Any, pull: Any, **more: Any) -> Transform:
    """What a client that has kept these sums is held by."""
    state = FisherSums({"w": torch.as_tensor(fisher)}, {"w": torch.as_tensor(pull)})
    client = client_of(experiment(), 1, state=state, **more)
    prepared = train_of(method, client).prepare(client)  # type: ignore[misc]
    (transform,) = prepared.transforms
    return transform


def test_stored_sums_give_the_gradient_of_the_whole_penalty() -> None:
    rng = np.random.default_rng(0)
    fishers, models = rng.uniform(size=(3, 5)), rng.normal(size=(3, 5))
    w, g = rng.normal(size=5), rng.normal(size=5)
    method = Ewc(lambda_=2.0, step="gradient")
    transform = penalty_of(method, fishers.sum(0), (fishers * models).sum(0))
    assert transform.acts_on_gradient()
    assert not transform.acts_on_step(sums_gradients=True)
    found = transform.on_gradient({"w": torch.tensor(g)}, {"w": torch.tensor(w)})["w"]
    expected = g + 2.0 * sum(f * (w - m) for f, m in zip(fishers, models, strict=True))
    np.testing.assert_allclose(found, expected)


def test_implicit_step_solves_its_equation_and_never_runs_away() -> None:
    fisher, target, w = (torch.tensor(v).double() for v in ([0, 1, 1e6], [1, 2, 3], [0, 0, 0]))
    transform = penalty_of(Ewc(lambda_=10.0), fisher, fisher * target)
    assert transform.acts_on_step(sums_gradients=True)
    assert not transform.acts_on_gradient()
    new = transform.on_step({"w": w}, {}, 0.1)["w"]
    torch.testing.assert_close(new, w - 0.1 * 10.0 * fisher * (new - target))
    torch.testing.assert_close(new, torch.tensor([0.0, 1.0, 3.0]).double(), atol=1e-5, rtol=0)


@pytest.mark.parametrize(("momentum", "atol"), [(0.0, 1e-9), (0.9, 1e-6)])
def test_implicit_steps_end_where_loss_and_penalty_balance(momentum: float, atol: float) -> None:
    fisher, anchor, target = (np.array(v) for v in ([0.0, 1.0, 40.0], [1.0, 2, 3], [5.0, 5, 5]))
    transform = penalty_of(Ewc(lambda_=2.0), fisher, fisher * anchor, momentum=momentum)
    w = torch.zeros(3).double().requires_grad_()
    optimizer = torch.optim.SGD([w], lr=0.05, momentum=momentum)
    for _ in range(2000):  # loss |w - target|^2 / 2
        optimizer.zero_grad()
        w.grad = w.detach() - torch.tensor(target)
        optimizer.step()
        with torch.no_grad():
            w.copy_(transform.on_step({"w": w}, {}, 0.05)["w"])
    minimum = (target + 2.0 * fisher * anchor) / (1 + 2.0 * fisher)
    np.testing.assert_allclose(w.detach().numpy(), minimum, atol=atol)


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_adaptive_optimizers_descend_the_penalty_by_its_gradient(optimizer: str) -> None:
    sums = OPTIMIZERS.find(optimizer).sums_gradients
    transform = penalty_of(Ewc(), [1.0], [2.0], sums_gradients=sums)
    assert transform.acts_on_gradient()
    assert not transform.acts_on_step(sums)
    train = TINY["train"] | {"optimizer": optimizer}
    with pytest.raises(UserError) as refusal:
        experiment({"kind": "ewc", "step": "implicit"}, train=train)
    sentence = f"method.step: must be 'gradient' or omitted with {optimizer}, got 'implicit'"
    assert str(refusal.value) == sentence


def test_a_round_with_adam_is_adam_on_loss_plus_penalty() -> None:
    """By hand: torch's Adam on the cross-entropy plus the penalty, with torch's gradients."""
    train = {"rounds": 1, "batch_size": 1000, "lr": 0.01, "optimizer": "adam", "max_steps": 3}
    made = experiment({"kind": "ewc", "lambda": 5.0}, train=train | {"local_epochs": 3})
    client = client_of(made, 1)
    shapes = client.params.items()
    fisher = {n: torch.rand(v.shape, generator=torch.Generator().manual_seed(1)) for n, v in shapes}
    anchor = {n: v + 0.3 for n, v in shapes}
    pull = {n: fisher[n] * anchor[n] for n in fisher}
    client = replace(client, state=FisherSums(fisher, pull), sums_gradients=False)
    training = LocalTraining(
        train_of(Ewc(lambda_=5.0), client), client.context, made.config.train, client.params,
        client.buffers, client.broadcast,
    )  # fmt: skip
    found, _ = train_client(training, client)
    leaves = {n: v.clone().requires_grad_() for n, v in shapes}
    optimizer = torch.optim.Adam(leaves.values(), lr=0.01)
    batch = client.data.batch(client.data.index)
    for _ in range(3):
        optimizer.zero_grad()
        logits = made.network.logits(leaves, batch.x, ForwardPass())
        loss = torch.nn.functional.cross_entropy(logits, batch.y)
        for name, leaf in leaves.items():
            loss = loss + 2.5 * (fisher[name] * (leaf - anchor[name]).square()).sum()
        loss.backward()
        optimizer.step()
    for name, leaf in leaves.items():
        torch.testing.assert_close(found[name], leaf.detach(), rtol=1e-4, atol=1e-5)


def test_fisher_is_added_up_over_tasks_and_not_sent() -> None:
    client = client_of(experiment({"kind": "ewc"}))
    method = Ewc(fisher="empirical", samples=None, anchor="each")
    _, ending = method.exchanges(client.context)
    assert not ending.communicates
    first = method.add_information(client)
    assert not first.fields
    assert first.state is not None
    second = method.add_information(replace(client, state=first.state)).state
    assert second is not None
    for name, value in first.state.fisher.items():
        torch.testing.assert_close(second.fisher[name], 2 * value)
        torch.testing.assert_close(second.pull[name], 2 * value * client.params[name])


@pytest.mark.parametrize("anchor", [None, "latest", "each"])
def test_the_model_that_ends_a_task_is_not_pulled_away_unless_each_task_has_an_anchor(
    anchor: Any,
) -> None:
    client = client_of(experiment({"kind": "ewc"}))
    given = {} if anchor is None else {"anchor": anchor}
    method = Ewc(lambda_=50.0, samples=8, **given)
    state = method.add_information(client).state
    moved = {name: value + 1.0 for name, value in client.params.items()}
    state = method.add_information(replace(client, params=moved, state=state)).state
    later = replace(client_of(experiment(), 1), state=state)
    prepared = train_of(method, later).prepare(later)  # type: ignore[misc]
    after = prepared.transforms[0].on_step(moved, moved, 0.1)
    distance = max(float((after[name] - moved[name]).abs().max()) for name in moved)
    assert (distance < 1e-5) == (anchor != "each")


@pytest.mark.parametrize("anchor", ["latest", "each"])
def test_information_of_outputs_of_earlier_tasks_is_kept(anchor: Any) -> None:
    made = experiment(
        stream={"kind": "split", "tasks": 2}, model={"hidden": [8], "head": "growing"}
    )
    server = made.initial_state().server
    grown = replace(server, params=made.grow(server.params, 1))
    context = made.task_context(1, grown.params)
    old = {"head.0.bias": torch.ones(5)}
    client = made.client(0, context, grown, {"params": grown.params})
    kept = Ewc(samples=4, anchor=anchor).add_information(
        replace(client, state=FisherSums(old, old))
    )
    assert kept.state is not None
    assert set(kept.state.fisher) == set(kept.state.pull) == {*context.trainable, "head.0.bias"}
    assert kept.state.fisher["head.0.bias"].tolist() == [1.0] * 5
